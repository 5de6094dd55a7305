// The vocabulary of a GGUF file: broken ones are refused with the key's name
// (case K84), and the roles of its tokens.

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <cstring>
#include <functional>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

using testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::string error_with(const std::function<void(GgufVocabulary&)>& change) {
  GgufVocabulary from = family_vocabulary("gpt2", "gpt-2");
  change(from);
  return error_of([&] { make_tokenizer(from); });
}

TEST(GgufVocabulary, BrokenOnesAreRefused) {
  EXPECT_EQ(error_with([](auto&) {}), "no error");
  EXPECT_EQ(error_with([](auto& from) { from.pre = "default"; }),
            "[load_tokenizer] gpt2.gguf: tokenizer.ggml.pre must be one of "
            "gpt-2, smollm, llama-bpe, qwen2 and qwen35 but got 'default'; use "
            "a model with one of these.");
  EXPECT_THAT(error_with([](auto& from) { from.pre.clear(); }),
              HasSubstr("tokenizer.ggml.pre must be one of"));
  EXPECT_EQ(error_with([](auto& from) { from.model = "bert"; }),
            "[load_tokenizer] gpt2.gguf: tokenizer.ggml.model must be 'gpt2' "
            "or 'llama' but got 'bert'; use a model with one of these.");
  EXPECT_THAT(error_with([](auto& from) { from.types.pop_back(); }),
              HasSubstr("tokenizer.ggml.token_type must have one entry a "
                        "token, 774, but got 773"));
  EXPECT_THAT(error_with([](auto& from) { from.scores = {1.0f}; }),
              HasSubstr("tokenizer.ggml.scores must have one entry a token"));
  EXPECT_THAT(error_with([](auto& from) { from.merges[3] = "nospace"; }),
              HasSubstr("tokenizer.ggml.merges[3] must be two tokens with a "
                        "space between but got 'nospace'"));
  EXPECT_THAT(error_with([](auto& from) { from.merges[3] = ""; }),
              HasSubstr("tokenizer.ggml.merges[3] must be two tokens"));
  EXPECT_THAT(error_with([](auto& from) { from.merges[3] = "zz zzz"; }),
              HasSubstr("merge 3 ('zz' 'zzz') must be of known tokens"));
  EXPECT_THAT(error_with([](auto& from) {
                from.tokens.clear();
                from.types.clear();
              }),
              HasSubstr("the vocabulary must not be empty"));
}

TEST(GgufVocabulary, IdsOutOfRangeAreRefused) {
  using Id = std::optional<int64_t> GgufVocabulary::*;
  const std::vector<std::pair<Id, const char*>> ids = {
      {&GgufVocabulary::bos_id, "bos_token_id"},
      {&GgufVocabulary::eos_id, "eos_token_id"},
      {&GgufVocabulary::eot_id, "eot_token_id"},
      {&GgufVocabulary::eom_id, "eom_token_id"},
      {&GgufVocabulary::unknown_id, "unknown_token_id"},
      {&GgufVocabulary::padding_id, "padding_token_id"}};
  for (const auto& entry : ids) {
    const Id member = entry.first;
    const std::string key = entry.second;
    for (const int64_t id : {int64_t{-1}, int64_t{774}, INT64_MAX}) {
      EXPECT_EQ(error_with([&](auto& from) { from.*member = id; }),
                "[load_tokenizer] gpt2.gguf: tokenizer.ggml." +
                    std::string(key) + " must be an id in [0, 774) but got " +
                    std::to_string(id) + "; the file is broken.");
    }
  }
}

TEST(GgufVocabulary, RolesComeFromTheKeysAndTheNames) {
  GgufVocabulary from = family_vocabulary("smollm", "smollm");
  from.bos_id = 1;
  from.eos_id = 2;
  const TokenizerPtr tokenizer = make_tokenizer(from);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_EQ(tokenizer->eot_id(), 2);                      // <|im_end|>
  EXPECT_EQ(tokenizer->special_ids().ends, (Ids{0, 2}));  // and <|endoftext|>
  EXPECT_FALSE(tokenizer->special_ids().add_bos);
  from.eom_id = 5;
  from.add_bos = true;
  EXPECT_EQ(make_tokenizer(from)->special_ids().ends, (Ids{0, 2, 5}));
  EXPECT_EQ(make_tokenizer(from)->encode("a", {.add_bos = true}).front(), 1);
}

// A token with a role is control whatever its type says, or its absence.
TEST(GgufVocabulary, ATokenWithARoleIsControl) {
  GgufVocabulary from = family_vocabulary("gpt2", "gpt-2");
  from.types.clear();
  from.eos_id = 2;
  const TokenizerPtr tokenizer = make_tokenizer(from);
  EXPECT_TRUE(tokenizer->is_control(2));
  EXPECT_EQ(tokenizer->encode("<|im_end|>", {.special = true}), Ids{2});
  EXPECT_GT(tokenizer->encode("<|im_end|>").size(), 1u);
}

TEST(GgufVocabulary, UserDefinedTokensAreTextUnlessTheyLookLikeControl) {
  GgufVocabulary from = family_vocabulary("gpt2", "gpt-2");
  from.tokens.push_back("<tool_call>");
  from.tokens.push_back("<|tool|>");
  from.types.push_back(4);
  from.types.push_back(4);
  const TokenizerPtr tokenizer = make_tokenizer(from);
  EXPECT_EQ(tokenizer->encode("<tool_call>"), Ids{774});
  EXPECT_GT(tokenizer->encode("<|tool|>").size(), 1u);
  EXPECT_EQ(tokenizer->encode("<|tool|>", {.special = true}), Ids{775});
}

// A GGUF file of metadata only.
class GgufWriter {
 public:
  void text(const std::string& key, const std::string& value) {
    begin(key, 8);
    put_text(value);
  }
  template <typename T>
  void number(const std::string& key, uint32_t type, T value) {
    begin(key, type);
    put(value);
  }
  void texts(const std::string& key, const std::vector<std::string>& values) {
    begin_array(key, 8, values.size());
    for (const std::string& value : values) put_text(value);
  }
  template <typename T>
  void numbers(const std::string& key, uint32_t type,
               const std::vector<T>& values) {
    begin_array(key, type, values.size());
    for (const T value : values) put(value);
  }

  std::filesystem::path write(const char* name) const {
    std::string file = "GGUF";
    append(file, uint32_t{3});
    append(file, uint64_t{0});
    append(file, count_);
    file += body_;
    const auto path =
        std::filesystem::temp_directory_path() /
        ("kvcache_" + std::to_string(::getpid()) + "_" + name + ".gguf");
    std::ofstream(path, std::ios::binary) << file;
    return path;
  }

 private:
  template <typename T>
  static void append(std::string& out, T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
  }
  template <typename T>
  void put(T value) {
    append(body_, value);
  }
  void put_text(const std::string& text) {
    put(uint64_t{text.size()});
    body_ += text;
  }
  void begin(const std::string& key, uint32_t type) {
    ++count_;
    put_text(key);
    put(type);
  }
  void begin_array(const std::string& key, uint32_t type, size_t size) {
    begin(key, 9);
    put(type);
    put(uint64_t{size});
  }

  std::string body_;
  uint64_t count_ = 0;
};

constexpr uint32_t kU8 = 0, kI32 = 5, kU32 = 4, kF32 = 6;

// A good file, in which `break_key` is written by `write` instead.
std::string file_error(const std::string& break_key,
                       const std::function<void(GgufWriter&)>& write) {
  const GgufVocabulary from = family_vocabulary("gpt2", "gpt-2");
  GgufWriter file;
  const auto unless_broken = [&](const char* name, const auto& put) {
    const std::string key = std::string("tokenizer.ggml.") + name;
    if (break_key == name) {
      write(file);
    } else {
      put(key);
    }
  };
  file.text("general.architecture", "gpt2");
  unless_broken("model", [&](const auto& key) { file.text(key, "gpt2"); });
  unless_broken("pre", [&](const auto& key) { file.text(key, "gpt-2"); });
  unless_broken("tokens",
                [&](const auto& key) { file.texts(key, from.tokens); });
  unless_broken("scores", [&](const auto& key) {
    file.numbers(key, kF32, std::vector<float>(from.tokens.size()));
  });
  unless_broken("token_type",
                [&](const auto& key) { file.numbers(key, kI32, from.types); });
  unless_broken("merges",
                [&](const auto& key) { file.texts(key, from.merges); });
  unless_broken("eos_token_id",
                [&](const auto& key) { file.number(key, kU32, uint32_t{2}); });
  const auto path = file.write("vocabulary");
  std::string error =
      error_of([&] { EXPECT_EQ(load_tokenizer(path)->eos_id(), 2); });
  std::filesystem::remove(path);
  return error;
}

TEST(GgufFileVocabulary, AGoodFileLoads) {
  EXPECT_EQ(file_error("", [](GgufWriter&) {}), "no error");
}

TEST(GgufFileVocabulary, ValuesOfTheWrongTypeAreRefusedByKey) {
  struct Case {
    const char* key;
    std::function<void(GgufWriter&)> write;
  };
  const auto key = [](const char* name) {
    return std::string("tokenizer.ggml.") + name;
  };
  const std::vector<Case> cases = {
      {"scores",
       [&](GgufWriter& file) {
         file.numbers(key("scores"), kU8, std::vector<uint8_t>(774));
       }},
      {"token_type",
       [&](GgufWriter& file) {
         file.numbers(key("token_type"), kF32, std::vector<float>(774));
       }},
      {"merges",
       [&](GgufWriter& file) {
         file.numbers(key("merges"), kI32, std::vector<int32_t>(774));
       }},
      {"tokens",
       [&](GgufWriter& file) {
         file.numbers(key("tokens"), kI32, std::vector<int32_t>(774));
       }},
      {"eos_token_id",
       [&](GgufWriter& file) { file.text(key("eos_token_id"), "2"); }},
      {"eos_token_id",
       [&](GgufWriter& file) {
         file.number(key("eos_token_id"), kI32, int32_t{-2});
       }},
      {"eos_token_id",
       [&](GgufWriter& file) {
         file.number(key("eos_token_id"), kU32, uint32_t{774});
       }},
      {"model", [&](GgufWriter& file) { file.number(key("model"), kU32, 1u); }},
      {"model", [](GgufWriter&) {}},
      {"tokens", [](GgufWriter&) {}},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(file_error(test.key, test.write), HasSubstr(key(test.key)));
  }
}

}  // namespace
}  // namespace kvcache::model::test
