// json_pipeline.cpp - the parts of a tokenizer.json around its model.

#include "json_pipeline.h"

#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace kvcache::model {
namespace {

constexpr int kMaxNesting = 16;

// Calls `visit(component)` for a component, or each of a Sequence of them.
template <typename Visit>
void for_each_component(const JsonField& field, const char* list,
                        const Visit& visit, int depth = 0) {
  if (field.is_null()) return;
  field.object();
  if (field["type"].string() != "Sequence") {
    visit(field);
    return;
  }
  if (depth == kMaxNesting) field.refuse("a component nested less deeply");
  const JsonField components = field[list];
  for (size_t i = 0; i < components.array().size(); ++i) {
    for_each_component(components[i], list, visit, depth + 1);
  }
}

SplitBehavior behavior_of(const JsonField& field) {
  constexpr std::array<std::pair<const char*, SplitBehavior>, 5> kNames = {{
      {"Isolated", SplitBehavior::kIsolated},
      {"Removed", SplitBehavior::kRemoved},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous},
  }};
  for (const auto& [name, behavior] : kNames) {
    if (field.string() == name) return behavior;
  }
  field.refuse("a known behaviour");
}

SplitStep read_split(const JsonField& field, const std::string& source) {
  const JsonField pattern = field["pattern"];
  const bool regex = !pattern["Regex"].is_null();
  const std::string& text = pattern[regex ? "Regex" : "String"].string();
  return {.pattern = Pattern(regex ? text : quote_pattern(text), source),
          .behavior = behavior_of(field["behavior"]),
          .invert = field["invert"].boolean(false)};
}

void read_step(const JsonField& field, const std::string& source,
               PreTokenizer& out) {
  const std::string& type = field["type"].string();
  if (type == "Split") {
    out.steps.push_back(read_split(field, source));
  } else if (type == "Digits") {
    out.steps.push_back({.pattern = Pattern(R"(\p{N})", source),
                         .behavior = field["individual_digits"].boolean(false)
                                         ? SplitBehavior::kIsolated
                                         : SplitBehavior::kContiguous});
  } else if (type == "Whitespace") {
    out.steps.push_back({.pattern = Pattern(R"(\w+|[^\w\s]+)", source),
                         .behavior = SplitBehavior::kRemoved,
                         .invert = true});
  } else if (type == "WhitespaceSplit") {
    out.steps.push_back({.pattern = Pattern(R"(\s)", source),
                         .behavior = SplitBehavior::kRemoved});
  } else if (type == "Punctuation") {
    // Unicode punctuation and all ASCII punctuation, symbols included.
    const JsonField behavior = field["behavior"];
    out.steps.push_back({.pattern = Pattern(R"([\p{P}$+<=>^`|~])", source),
                         .behavior = behavior.is_null()
                                         ? SplitBehavior::kIsolated
                                         : behavior_of(behavior)});
  } else {
    field["type"].refuse(
        "one of Sequence, Split, Digits, ByteLevel, Whitespace, "
        "WhitespaceSplit and Punctuation");
  }
}

}  // namespace

void read_normalizer(const JsonField& field, Normalizer& normalizer) {
  constexpr std::array<std::pair<const char*, NormalForm>, 4> kForms = {{
      {"NFC", NormalForm::kNfc},
      {"NFD", NormalForm::kNfd},
      {"NFKC", NormalForm::kNfkc},
      {"NFKD", NormalForm::kNfkd},
  }};
  for_each_component(field, "normalizers", [&](const JsonField& step) {
    const std::string& type = step["type"].string();
    for (const auto& [name, form] : kForms) {
      if (type != name) continue;
      normalizer.steps.push_back({.form = form});
      return;
    }
    if (type == "Replace") {
      const std::string& pattern = step["pattern"]["String"].string();
      if (pattern.empty()) step["pattern"]["String"].refuse("not empty");
      normalizer.steps.push_back({.kind = NormalizerStep::Kind::kReplace,
                                  .pattern = pattern,
                                  .content = step["content"].string()});
    } else if (type == "Prepend") {
      normalizer.steps.push_back({.kind = NormalizerStep::Kind::kPrepend,
                                  .content = step["prepend"].string()});
    } else {
      step["type"].refuse(
          "one of Sequence, NFC, NFD, NFKC, NFKD, Replace and Prepend");
    }
  });
}

void read_pre_tokenizer(const JsonField& field, const std::string& source,
                        PreTokenizer& pre_tokenizer) {
  bool byte_level = false;
  for_each_component(field, "pretokenizers", [&](const JsonField& step) {
    if (byte_level) step["type"].refuse("before ByteLevel, which comes last,");
    if (step["type"].string() != "ByteLevel") {
      read_step(step, source, pre_tokenizer);
      return;
    }
    byte_level = true;
    pre_tokenizer.add_prefix_space = step["add_prefix_space"].boolean(true);
    if (step["use_regex"].boolean(true)) {
      pre_tokenizer.words = Pattern(kGpt2Pattern, source);
    }
  });
  if (!byte_level) field.refuse("one that ends in ByteLevel");
}

void check_decoder(const JsonField& field) {
  for_each_component(field, "decoders", [](const JsonField& decoder) {
    if (decoder["type"].string() != "ByteLevel") {
      decoder["type"].refuse("'ByteLevel'");
    }
  });
}

void read_post_processor(const JsonField& field, SpecialIds& ids) {
  for_each_component(field, "processors", [&](const JsonField& processor) {
    const std::string& type = processor["type"].string();
    if (type == "ByteLevel") return;  // offsets only
    if (type != "TemplateProcessing") {
      processor["type"].refuse(
          "one of Sequence, ByteLevel, TemplateProcessing");
    }
    const JsonField single = processor["single"];
    bool text_seen = false;
    for (size_t i = 0; i < single.array().size(); ++i) {
      const JsonField piece = single[i];
      if (!piece["Sequence"].is_null()) {
        text_seen = true;
        continue;
      }
      const std::string& name = piece["SpecialToken"]["id"].string();
      const JsonField token = processor["special_tokens"][name.c_str()];
      const int64_t id = token["ids"][size_t{0}].integer();
      bool& adds = text_seen ? ids.add_eos : ids.add_bos;
      if (adds || token["ids"].array().size() != 1) {
        piece.refuse("the only token on its side of the text");
      }
      adds = true;
      (text_seen ? ids.eos : ids.bos) = id;
    }
  });
}

}  // namespace kvcache::model
