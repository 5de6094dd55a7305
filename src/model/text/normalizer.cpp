// normalizer.cpp - what is done to a text before it is cut into words.

#include "normalizer.h"

#include <c10/util/Exception.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "utf8.h"

namespace kvcache::model {
namespace {

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x80;
  });
}

int combining_class(uint32_t codepoint) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(codepoint))
      ->combining_class;
}

// Puts long runs of combining marks in their canonical order. utf8proc does
// that too, but in time that grows with the square of the run.
std::string sort_marks(std::string_view text) {
  constexpr size_t kLongRun = 64;
  std::string out;
  std::vector<uint32_t> run;
  const auto flush = [&] {
    if (run.size() > kLongRun) {
      std::stable_sort(run.begin(), run.end(), [](uint32_t a, uint32_t b) {
        return combining_class(a) < combining_class(b);
      });
    }
    for (const uint32_t mark : run) append_utf8(out, mark);
    run.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    if (combining_class(step.codepoint) != 0) {
      run.push_back(step.codepoint);
    } else {
      flush();
      out += text.substr(at, step.length);
    }
    at += step.length;
  }
  flush();
  return out;
}

// `text` is valid UTF-8.
std::string to_form(std::string_view text, NormalForm form) {
  if (is_ascii(text)) return std::string(text);
  const std::string sorted = sort_marks(text);
  int options = UTF8PROC_STABLE;
  const bool compose = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  options |= compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::kNfkc || form == NormalForm::kNfkd) {
    options |= UTF8PROC_COMPAT;
  }
  utf8proc_uint8_t* raw = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(sorted.data()),
                   static_cast<utf8proc_ssize_t>(sorted.size()), &raw,
                   static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(
      raw, &std::free);
  TORCH_CHECK(length >= 0, "[Tokenizer::encode] a text of ", text.size(),
              " bytes must have a Unicode normal form but ",
              utf8proc_errmsg(length), "; check the text.");
  return {reinterpret_cast<const char*>(raw), static_cast<size_t>(length)};
}

std::string replaced(std::string_view text, const NormalizerStep& step) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(step.pattern); at != std::string_view::npos;
       at = text.find(step.pattern, done)) {
    out += text.substr(done, at - done);
    out += step.content;
    done = at + step.pattern.size();
  }
  out += text.substr(done);
  return out;
}

std::string apply_form(std::string_view text, NormalForm form) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t valid = valid_run_end(text, at);
    if (valid > at) out += to_form(text.substr(at, valid - at), form);
    at = invalid_run_end(text, valid);
    out += text.substr(valid, at - valid);
  }
  return out;
}

}  // namespace

std::string Normalizer::apply(std::string_view text) const {
  std::string out(text);
  for (const NormalizerStep& step : steps) {
    switch (step.kind) {
      case NormalizerStep::Kind::kForm:
        out = apply_form(out, step.form);
        break;
      case NormalizerStep::Kind::kReplace:
        out = replaced(out, step);
        break;
      case NormalizerStep::Kind::kPrepend:
        if (!out.empty()) out.insert(0, step.content);
        break;
    }
  }
  return out;
}

}  // namespace kvcache::model
