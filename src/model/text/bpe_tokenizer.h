// bpe_tokenizer.h - byte-level BPE, whatever file it came from.

#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "added_tokens.h"
#include "byte_pairs.h"
#include "kvcache/model/tokenizer.h"
#include "normalizer.h"
#include "pre_tokenizer.h"

namespace kvcache::model {

// Everything a byte-level BPE tokenizer is made of.
struct BpeDefinition {
  std::string source;  // file name, for messages
  // As the file spells them: bytes as GPT-2's printable characters. A hole in
  // the ids has an empty text.
  std::vector<std::string> tokens = {};
  std::vector<std::pair<std::string, std::string>> merges = {};  // best first
  std::vector<AddedToken> added =
      {};  // spelled plainly; may go beyond `tokens`
  Normalizer normalizer = {};
  PreTokenizer pre_tokenizer = {};
  std::optional<std::string> unknown = {};
  bool fuse_unknown = false;
  bool ignore_merges = false;  // a word that is a token is that token
  SpecialIds special = {};
};

TokenizerPtr make_bpe_tokenizer(BpeDefinition definition);

// A token in GPT-2's printable characters as the bytes it stands for; as it is
// if a character of it is none of those.
std::string to_bytes(std::string_view printable);

}  // namespace kvcache::model
