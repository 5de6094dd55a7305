// bpe_tokenizer.cpp - byte-level BPE, whatever file it came from.

#include "bpe_tokenizer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "utf8.h"

namespace kvcache::model {
namespace {

// GPT-2's table: printable Latin-1 characters stand for themselves, the other
// bytes for U+0100 and up. Returns the byte of a character, or -1.
int byte_of(uint32_t codepoint) {
  static const std::vector<int> table = [] {
    std::vector<int> bytes(0x144, -1);
    uint32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) ||
                             (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      bytes[printable ? static_cast<uint32_t>(byte) : next++] = byte;
    }
    return bytes;
  }();
  return codepoint < table.size() ? table[codepoint] : -1;
}

using Index = std::unordered_map<std::string_view, int32_t>;

// The tokens as the file spells them, by spelling; the first of a name counts.
Index index_tokens(const std::vector<std::string>& tokens) {
  Index index;
  index.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].empty()) {
      index.try_emplace(tokens[i], static_cast<int32_t>(i));
    }
  }
  return index;
}

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(BpeDefinition definition, const Index& spelled);

  int64_t vocab_size() const noexcept override {
    return static_cast<int64_t>(bytes_.size());
  }

 private:
  void do_encode(std::string_view text, const std::string& special,
                 std::vector<int64_t>& ids) const override;
  std::string_view do_token_bytes(int64_t id) const override {
    return bytes_[static_cast<size_t>(id)];
  }
  std::optional<int64_t> do_id_of(std::string_view text) const override {
    const auto found = ids_.find(text);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }
  bool do_is_control(int64_t id) const override {
    return control_[static_cast<size_t>(id)];
  }

  void add_merges(const BpeDefinition& definition, const Index& spelled);
  void encode_normalized(std::string_view text,
                         std::vector<int64_t>& ids) const;
  void encode_word(std::string_view word, std::vector<int64_t>& ids) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  bool ignore_merges_;
  AddedTokens added_;               // found in the text as it is
  AddedTokens added_normalized_;    // found in the normalised text
  std::vector<std::string> bytes_;  // of each token
  std::vector<bool> control_;
  std::unordered_map<std::string_view, int32_t> ids_;  // by bytes_
  BytePairs pairs_;
};

std::vector<AddedToken> added_where(const std::vector<AddedToken>& tokens,
                                    bool normalized) {
  std::vector<AddedToken> chosen;
  for (const AddedToken& token : tokens) {
    // Control tokens are found before anything is changed, so that the marks
    // of where they may be stay true.
    if ((token.normalized && !token.control) == normalized) {
      chosen.push_back(token);
    }
  }
  return chosen;
}

std::vector<AddedToken> normalized_texts(std::vector<AddedToken> tokens,
                                         const Normalizer& normalizer) {
  for (AddedToken& token : tokens) token.text = normalizer.apply(token.text);
  return tokens;
}

BpeTokenizer::BpeTokenizer(BpeDefinition definition, const Index& spelled)
    : Tokenizer(definition.special),
      normalizer_(definition.normalizer),
      pre_tokenizer_(definition.pre_tokenizer),
      ignore_merges_(definition.ignore_merges),
      added_(added_where(definition.added, false)),
      added_normalized_(normalized_texts(added_where(definition.added, true),
                                         definition.normalizer)),
      pairs_{.merges = MergeTable(definition.merges.size()),
             .fuse_unknown = definition.fuse_unknown} {
  bytes_.reserve(definition.tokens.size());
  for (const std::string& token : definition.tokens) {
    bytes_.push_back(to_bytes(token));
  }
  control_.assign(bytes_.size(), false);
  for (const AddedToken& token : definition.added) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= bytes_.size()) {
      bytes_.resize(id + 1);
      control_.resize(id + 1, false);
    }
    bytes_[id] = token.text;
    control_[id] = token.control;
  }
  ids_.reserve(bytes_.size());
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!bytes_[i].empty()) {
      ids_.try_emplace(bytes_[i], static_cast<int32_t>(i));
    }
  }
  add_merges(definition, spelled);
}

// Plain text must not become a control token, so neither bytes nor merges nor
// the unknown token may lead to one.
void BpeTokenizer::add_merges(const BpeDefinition& definition,
                              const Index& spelled) {
  const auto plain = [&](int32_t token) {
    return !control_[static_cast<size_t>(token)];
  };
  pairs_.bytes.fill(kNoToken);
  for (const auto& [spelling, token] : spelled) {
    const std::string_view bytes = bytes_[static_cast<size_t>(token)];
    if (bytes.size() == 1 && plain(token)) {
      pairs_.bytes[static_cast<uint8_t>(bytes[0])] = token;
    }
  }
  if (definition.unknown) {
    const auto found = spelled.find(*definition.unknown);
    if (found != spelled.end() && plain(found->second)) {
      pairs_.unknown = found->second;
    }
  }
  uint32_t rank = 0;
  std::string joined;
  for (const auto& [left, right] : definition.merges) {
    joined = left + right;
    const std::array<std::string_view, 3> names = {left, right, joined};
    std::array<int32_t, 3> found{};
    for (size_t i = 0; i < 3; ++i) {
      const auto token = spelled.find(names[i]);
      TORCH_CHECK(token != spelled.end(), "[load_tokenizer] ",
                  definition.source, ": merge ", rank, " ('", left, "' '",
                  right, "') must be of known tokens but '", names[i],
                  "' is not in the vocabulary; the file is broken.");
      found[i] = token->second;
    }
    if (plain(found[2])) {
      pairs_.merges.insert(found[0], found[1], {rank, found[2]});
    }
    ++rank;
  }
}

void BpeTokenizer::do_encode(std::string_view text, const std::string& special,
                             std::vector<int64_t>& ids) const {
  TORCH_CHECK_VALUE(
      text.size() <= std::numeric_limits<int32_t>::max(),
      "[Tokenizer::encode] a text must have fewer than 2^31 bytes but got ",
      text.size(), "; encode it in parts.");
  const auto token = [&](int64_t id) { ids.push_back(id); };
  const auto plain = [&](size_t begin, size_t end) {
    const std::string_view part = text.substr(begin, end - begin);
    if (normalizer_.empty()) {
      encode_normalized(part, ids);
    } else {
      encode_normalized(normalizer_.apply(part), ids);
    }
  };
  added_.split(text, special, plain, token);
}

void BpeTokenizer::encode_normalized(std::string_view text,
                                     std::vector<int64_t>& ids) const {
  const auto word = [&](std::string_view bytes) { encode_word(bytes, ids); };
  added_normalized_.split(
      text, {},
      [&](size_t begin, size_t end) {
        pre_tokenizer_.cut(text.substr(begin, end - begin), word);
      },
      [&](int64_t id) { ids.push_back(id); });
}

void BpeTokenizer::encode_word(std::string_view word,
                               std::vector<int64_t>& ids) const {
  if (ignore_merges_) {
    const auto found = ids_.find(word);
    if (found != ids_.end() && !control_[static_cast<size_t>(found->second)]) {
      ids.push_back(found->second);
      return;
    }
  }
  pairs_.encode(word, ids);
}

}  // namespace

std::string to_bytes(std::string_view printable) {
  std::string bytes;
  for (size_t at = 0; at < printable.size();) {
    const Utf8Step step = utf8_step(printable, at);
    const int byte = step.valid ? byte_of(step.codepoint) : -1;
    if (byte < 0) return std::string(printable);
    bytes += static_cast<char>(byte);
    at += step.length;
  }
  return bytes;
}

TokenizerPtr make_bpe_tokenizer(BpeDefinition definition) {
  const std::string& source = definition.source;
  TORCH_CHECK(!definition.tokens.empty(), "[load_tokenizer] ", source,
              ": the vocabulary must not be empty; the file is broken.");
  size_t size = definition.tokens.size();
  for (const AddedToken& token : definition.added) {
    size = std::max(size, static_cast<size_t>(token.id) + 1);
  }
  const auto check = [&](const char* name, std::optional<int64_t> id) {
    TORCH_CHECK(!id || (*id >= 0 && *id < static_cast<int64_t>(size)),
                "[load_tokenizer] ", source, ": ", name,
                " must be an id in [0, ", size, ") but got ", *id,
                "; the file is broken.");
  };
  check("the begin token", definition.special.bos);
  check("the end token", definition.special.eos);
  check("the end-of-turn token", definition.special.eot);
  check("the unknown token", definition.special.unknown);
  check("the padding token", definition.special.padding);
  complete_special_ids(definition.added, definition.special);
  const std::vector<std::string> spelled = definition.tokens;
  return std::make_shared<BpeTokenizer>(std::move(definition),
                                        index_tokens(spelled));
}

}  // namespace kvcache::model
