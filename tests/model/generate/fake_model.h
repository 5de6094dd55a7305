// fake_model.h - a model whose next token is a function of what its cache
// really holds, and a tokenizer over a list of strings.
//
// Each token's id is stored as its K and V. The logits of a position are made
// from the ids read back from the view, so that a cache which lost, moved or
// invented a token gives other logits.
#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/model/language_model.h"
#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

class FakeModel final : public LanguageModel {
 public:
  using History = std::span<const int64_t>;
  using Logits = std::function<std::vector<float>(History)>;

  // `logits`: [V] after the given tokens.
  FakeModel(int64_t vocab_size, int64_t context, Logits logits,
            std::vector<int64_t> ends = {})
      : vocab_size_(vocab_size),
        context_(context),
        logits_(std::move(logits)),
        ends_(std::move(ends)) {}

  // Says `script` after a prompt of `prompt` tokens, over and over; other
  // logits depend on the whole history.
  static std::shared_ptr<FakeModel> scripted(int64_t vocab_size,
                                             int64_t context, size_t prompt,
                                             std::vector<int64_t> script,
                                             std::vector<int64_t> ends = {}) {
    return std::make_shared<FakeModel>(
        vocab_size, context,
        [=](History history) {
          auto row = mixed(vocab_size, history);
          if (history.size() >= prompt) {
            const size_t i = (history.size() - prompt) % script.size();
            row[static_cast<size_t>(script[i])] = 20;
          }
          return row;
        },
        std::move(ends));
  }

  // Logits in [-4, 4) from a hash of the history.
  static std::vector<float> mixed(int64_t vocab_size, History history) {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const int64_t id : history) {
      hash = (hash ^ static_cast<uint64_t>(id + 1)) * 0xbf58476d1ce4e5b9;
      hash ^= hash >> 29;
    }
    std::vector<float> row(static_cast<size_t>(vocab_size));
    for (float& logit : row) {
      hash = hash * 0x94d049bb133111eb + 0x2545f4914f6cdd1d;
      logit = static_cast<float>(hash >> 40) / 2097152.0F - 4.0F;
    }
    return row;
  }
  static std::shared_ptr<FakeModel> hashed(int64_t vocab_size, int64_t context,
                                           std::vector<int64_t> ends = {}) {
    return std::make_shared<FakeModel>(
        vocab_size, context,
        [=](History history) { return mixed(vocab_size, history); },
        std::move(ends));
  }

  int64_t vocab_size() const noexcept override { return vocab_size_; }
  int64_t context_length() const noexcept override { return context_; }
  std::span<const int64_t> end_tokens() const noexcept override {
    return ends_;
  }
  CacheSpec cache_spec(int64_t rows,
                       std::optional<int64_t> capacity) const override {
    CacheSpec spec;
    spec.rows = rows;
    spec.capacity = capacity;
    spec.dtype = at::kFloat;
    spec.layers = {AttentionLayer{.heads = 1, .head_dim = 4},
                   AttentionLayer{.heads = 1, .head_dim = 4}};
    return spec;
  }
  void check_cache(const CacheSpec& spec) const override {
    TORCH_CHECK_VALUE(spec.layers == cache_spec(1, 1).layers,
                      "[FakeModel::check_cache] layer 0 differs.");
  }

  Tensor forward(const Tensor& ids, Step& step,
                 const ForwardOptions& options) const override {
    ++steps;
    const auto made = [&] {
      Tensor kv = at::zeros({ids.size(0), 1, ids.size(1), 4}, at::kFloat);
      for (int64_t b = 0; b < ids.size(0); ++b) {
        for (int64_t t = 0; t < ids.size(1); ++t) {
          kv.mutable_data_ptr<float>()[(b * ids.size(1) + t) * 4] =
              static_cast<float>(ids[b][t].item<int64_t>());
        }
      }
      return kv;
    };
    step.update(0, made(), made());
    const KvView& view = step.update(1, made(), made());
    return rows_of(ids, options, [&](int64_t b, int64_t t) {
      std::vector<int64_t> history;
      for (int64_t p = 0; p < view.limits[b][t].item<int64_t>(); ++p) {
        history.push_back(
            static_cast<int64_t>(view.v[b][0][p][0].item<float>()));
      }
      return history;
    });
  }
  Tensor forward(const Tensor& ids,
                 const ForwardOptions& options) const override {
    ++steps;
    return rows_of(ids, options, [&](int64_t b, int64_t t) {
      std::vector<int64_t> history;
      for (int64_t p = 0; p <= t; ++p) {
        history.push_back(ids[b][p].item<int64_t>());
      }
      return history;
    });
  }

  mutable std::atomic<int64_t> steps = 0;        // forwards so far
  mutable std::atomic<int64_t> fail_after = -1;  // throw when `steps` passes it
  mutable std::atomic<int64_t> fail_once_at = -1;  // and when it is just this

 private:
  template <typename HistoryOf>
  Tensor rows_of(const Tensor& ids, const ForwardOptions& options,
                 const HistoryOf& history_of) const {
    TORCH_CHECK(
        (fail_after < 0 || steps <= fail_after) && steps != fail_once_at,
        "[FakeModel] told to.");
    const int64_t last = ids.size(1) - 1;
    const int64_t count = options.all_logits ? ids.size(1) : 1;
    Tensor logits = at::zeros({ids.size(0), count, vocab_size_}, at::kFloat);
    float* out = logits.mutable_data_ptr<float>();
    for (int64_t b = 0; b < ids.size(0); ++b) {
      for (int64_t t = options.all_logits ? 0 : last; t <= last; ++t) {
        const auto row = logits_(history_of(b, t));
        out = std::copy(row.begin(), row.end(), out);
      }
    }
    return logits;
  }

  int64_t vocab_size_;
  int64_t context_;
  Logits logits_;
  std::vector<int64_t> ends_;
};

// Token i is bytes[i]; control tokens give no text.
class FakeTokenizer final : public Tokenizer {
 public:
  explicit FakeTokenizer(std::vector<std::string> bytes,
                         std::vector<int64_t> controls = {})
      : Tokenizer(special(controls)),
        bytes_(std::move(bytes)),
        controls_(std::move(controls)) {}

  int64_t vocab_size() const noexcept override {
    return static_cast<int64_t>(bytes_.size());
  }

 private:
  static SpecialIds special(const std::vector<int64_t>& controls) {
    SpecialIds ids;
    ids.ends = controls;
    return ids;
  }
  void do_encode(std::string_view text, const std::string&,
                 std::vector<int64_t>& ids) const override {
    while (!text.empty()) {
      size_t id = 0;
      while (bytes_[id].empty() || !text.starts_with(bytes_[id])) ++id;
      ids.push_back(static_cast<int64_t>(id));
      text.remove_prefix(bytes_[id].size());
    }
  }
  std::string_view do_token_bytes(int64_t id) const override {
    return bytes_[static_cast<size_t>(id)];
  }
  std::optional<int64_t> do_id_of(std::string_view text) const override {
    const auto found = std::find(bytes_.begin(), bytes_.end(), text);
    if (found == bytes_.end()) return std::nullopt;
    return found - bytes_.begin();
  }
  bool do_is_control(int64_t id) const override {
    return std::find(controls_.begin(), controls_.end(), id) != controls_.end();
  }

  std::vector<std::string> bytes_;
  std::vector<int64_t> controls_;
};

}  // namespace kvcache::model
