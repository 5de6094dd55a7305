// families_test.cpp - each family against Hugging Face transformers' numbers.
#include <gtest/gtest.h>

#include <string>

#include "tests/model/forward/reference_data.h"

namespace kvcache::testing {
namespace {

// Float32 sums in another order; the tiny models have logits of size 3.
constexpr double kTolerance = 1e-4;

struct Variant {
  std::string model;  // a folder or a .gguf
  std::string numbers;
};

class FamiliesTest : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    model = load_tiny(GetParam().model);
    numbers = read_json(GetParam().numbers);
  }
  void expect_numbers(const nlohmann::json& prompt, const Tensor& logits) {
    const Ids tokens = prompt["tokens"];
    const std::vector<double> wanted = prompt["log_probs"];
    EXPECT_LT(largest_difference(log_probs(logits, tokens), wanted),
              kTolerance);
    for (const auto& at : prompt["logits"]) {
      const Tensor row = logits[at["position"].get<int64_t>()].contiguous();
      const float* values = row.const_data_ptr<float>();
      EXPECT_LT(largest_difference({values, values + row.numel()},
                                   at["values"].get<std::vector<double>>()),
                kTolerance)
          << "position " << at["position"];
    }
  }
  std::shared_ptr<const Transformer> model;
  nlohmann::json numbers;
};

TEST_P(FamiliesTest, LogitsAndLogProbabilitiesAreTransformers) {
  for (const auto& prompt : numbers["prompts"]) {
    SCOPED_TRACE(prompt["name"].get<std::string>());
    const Ids tokens = prompt["tokens"];
    expect_numbers(prompt, all_logits(*model, tokens, Kind::kNone, 0));
    for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
      for (const int64_t chunk : {1, 3, 7, 256}) {
        SCOPED_TRACE(chunk);
        expect_numbers(prompt, all_logits(*model, tokens, kind, chunk));
      }
    }
  }
}

TEST_P(FamiliesTest, GreedyTextIsTransformers) {
  for (const auto& prompt : numbers["prompts"]) {
    SCOPED_TRACE(prompt["name"].get<std::string>());
    const Ids tokens = prompt["tokens"];
    const Ids wanted = prompt["greedy"]["tokens"];
    for (const Kind kind : {Kind::kNone, Kind::kConcat, Kind::kPreallocated}) {
      EXPECT_EQ(
          greedy(*model, tokens, kind, static_cast<int64_t>(wanted.size())),
          wanted);
    }
  }
}

// Rows of other lengths, padded on the left with ids that are no tokens.
TEST_P(FamiliesTest, LeftPaddedBatchesAreTransformers) {
  for (const Ids& lengths :
       {Ids{0, 4}, Ids{1, 3, 4}, Ids{4, 2, 0, 4}, Ids{0, 0}}) {
    const auto rows = static_cast<int64_t>(lengths.size());
    std::vector<nlohmann::json> prompts;
    int64_t longest = 0;
    for (const int64_t index : lengths) {
      prompts.push_back(numbers["prompts"][static_cast<size_t>(index)]);
      longest = std::max(longest,
                         static_cast<int64_t>(prompts.back()["tokens"].size()));
    }
    for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
      const auto cache = make_cache(kind, *model, rows, 128);
      std::vector<Tensor> padded;
      Ids skip;
      for (const auto& prompt : prompts) {
        Ids tokens = prompt["tokens"];
        skip.push_back(longest - static_cast<int64_t>(tokens.size()));
        tokens.insert(tokens.begin(), static_cast<size_t>(skip.back()), -7);
        padded.push_back(as_row(tokens));
      }
      const Tensor logits = step(*model, *cache, at::cat(padded), true, skip);
      for (int64_t b = 0; b < rows; ++b) {
        const int64_t from = skip[static_cast<size_t>(b)];
        EXPECT_TRUE(logits[b].narrow(0, 0, from).eq(0).all().item<bool>());
        expect_numbers(prompts[static_cast<size_t>(b)],
                       logits[b].narrow(0, from, longest - from));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FamiliesTest,
    ::testing::Values(
        Variant{"gpt2", "gpt2/expected.json"},
        Variant{"gpt2/model.gguf", "gpt2/expected.json"},
        Variant{"llama", "llama/expected.json"},
        Variant{"llama/model.gguf", "llama/expected.json"},
        Variant{"llama/model-q8_0.gguf", "llama/expected-q8_0.json"},
        Variant{"llama_rope3", "llama_rope3/expected.json"},
        Variant{"llama_rope3/model.gguf", "llama_rope3/expected.json"},
        Variant{"llama_bias", "llama_bias/expected.json"},
        Variant{"llama_bias/model.gguf", "llama_bias/expected.json"},
        Variant{"mistral", "mistral/expected.json"},
        Variant{"qwen2", "qwen2/expected.json"},
        Variant{"qwen2/model.gguf", "qwen2/expected.json"},
        Variant{"qwen3", "qwen3/expected.json"},
        Variant{"qwen3/model.gguf", "qwen3/expected.json"}),
    [](const auto& info) {
      std::string name = info.param.model;
      for (char& c : name) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
      }
      return name;
    });

}  // namespace
}  // namespace kvcache::testing
