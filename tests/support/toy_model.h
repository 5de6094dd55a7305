// support/toy_model.h - a toy language model that sees a cache only as a Step,
// and a stateless oracle of it.
//
// Both use the same arithmetic, token by token and key by key in a fixed order,
// so that what they give is compared bit for bit. E hidden numbers a token; a
// token id of kDead has NaN for an embedding.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kvcache/cache.h"

namespace kvcache::toy {

inline constexpr int kVocabulary = 8;
inline constexpr int kDead = -1;
inline constexpr int kWidth = 6;  // E
// A recurrent layer's inputs: query and key of 3, value of 2.
inline constexpr int kChannels = 8, kKey = 3, kValue = 2;

using Floats = std::vector<float>;

struct Model {
  std::vector<LayerSpec> layers;
  int64_t first_layer = 0;
  Floats embedding;  // [vocabulary, E]
  struct Weights {
    Floats in;     // [inputs, E]
    Floats conv;   // [C, Kc + 1]
    Floats gates;  // [2, E]
    Floats out;    // [E, outputs]
  };
  std::vector<Weights> weights;
};

enum class Variant { kAttention, kHybrid, kSliding, kMixed };
inline constexpr Variant kVariants[] = {Variant::kAttention, Variant::kHybrid,
                                        Variant::kSliding, Variant::kMixed};

inline std::string name_of(Variant variant) {
  const char* names[] = {"Attention", "Hybrid", "Sliding", "Mixed"};
  return names[static_cast<int>(variant)];
}

inline bool has_states(const std::vector<LayerSpec>& layers) {
  for (const LayerSpec& layer : layers) {
    if (std::holds_alternative<RecurrentLayer>(layer)) {
      return true;
    }
  }
  return false;
}

inline std::vector<LayerSpec> layers_of(Variant variant) {
  const AttentionLayer full{.heads = 2, .head_dim = 4};
  const AttentionLayer wide{.heads = 1, .head_dim = 6, .sliding = 5};
  const AttentionLayer narrow{.heads = 2, .head_dim = 4, .sliding = 3};
  const RecurrentLayer delta{.conv_channels = kChannels,
                             .conv_taps = 3,
                             .state_shape = {kKey, kValue}};
  const RecurrentLayer conv{.conv_channels = kChannels, .conv_taps = 2};
  const RecurrentLayer state{.state_shape = {kKey, kValue}};
  switch (variant) {
    case Variant::kAttention:
      return {full, full};
    case Variant::kHybrid:
      return {delta, full, delta, full};
    case Variant::kSliding:
      return {full, narrow, wide};
    case Variant::kMixed:
      return {conv, narrow, state, delta, wide};
  }
  return {};
}

// Numbers an attention layer's inputs, or a recurrent one's channels.
inline int inputs_of(const LayerSpec& layer) {
  if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
    return static_cast<int>(3 * a->heads * a->head_dim);  // q, k, v
  }
  return kChannels;
}

inline int outputs_of(const LayerSpec& layer) {
  if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
    return static_cast<int>(a->heads * a->head_dim);
  }
  return std::get<RecurrentLayer>(layer).state_shape.empty() ? kChannels
                                                             : kValue;
}

inline Model make_model(std::vector<LayerSpec> layers, unsigned seed = 1) {
  std::mt19937 random(seed);
  const auto numbers = [&](size_t count, float scale) {
    std::uniform_real_distribution<float> number(-scale, scale);
    Floats made(count);
    for (float& value : made) {
      value = number(random);
    }
    return made;
  };
  Model model{.layers = std::move(layers),
              .embedding = numbers(kVocabulary * kWidth, 1),
              .weights = {}};
  for (const LayerSpec& layer : model.layers) {
    const auto in = static_cast<size_t>(inputs_of(layer));
    const auto out = static_cast<size_t>(outputs_of(layer));
    size_t taps = 0;
    if (const auto* r = std::get_if<RecurrentLayer>(&layer)) {
      taps = static_cast<size_t>(r->conv_taps);
    }
    model.weights.push_back({.in = numbers(in * kWidth, 1),
                             .conv = numbers(kChannels * (taps + 1), 1),
                             .gates = numbers(2 * kWidth, 1),
                             .out = numbers(kWidth * out, 1)});
  }
  return model;
}

inline Model make_model(Variant variant, unsigned seed = 1) {
  return make_model(layers_of(variant), seed);
}

// --- arithmetic, shared by the forward and the oracle -----------------------

// To the values that `dtype` can hold.
inline float rounded(float value, at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? static_cast<float>(c10::BFloat16(value))
                                : value;
}

[[gnu::noinline]] inline void project(const Floats& weights, const float* in,
                                      int inputs, float* out, int outputs) {
  for (int o = 0; o < outputs; ++o) {
    float sum = 0;
    for (int i = 0; i < inputs; ++i) {
      sum += weights[static_cast<size_t>(o * inputs + i)] * in[i];
    }
    out[o] = sum;
  }
}

// h = tanh(h + out x)
[[gnu::noinline]] inline void add_output(const Floats& weights, const float* x,
                                         int inputs, float* hidden) {
  float y[kWidth];
  project(weights, x, inputs, y, kWidth);
  for (int e = 0; e < kWidth; ++e) {
    hidden[e] = std::tanh(hidden[e] + y[e]);
  }
}

inline void embed(const Model& model, int id, int64_t position, float* hidden) {
  for (int e = 0; e < kWidth; ++e) {
    hidden[e] = id == kDead
                    ? std::numeric_limits<float>::quiet_NaN()
                    : model.embedding[static_cast<size_t>(id * kWidth + e)] +
                          std::sin(0.3F * static_cast<float>(position) +
                                   static_cast<float>(e));
  }
}

// One query head over keys [first, end) in their order; `key`, `value` give
// element d of position p. Nothing seen gives 0.
template <typename Key, typename Value>
[[gnu::noinline]] void attend_head(const float* q, int64_t dim, int64_t first,
                                   int64_t end, const Key& key,
                                   const Value& value, float* out) {
  Floats scores;
  float best = -std::numeric_limits<float>::infinity();
  for (int64_t p = first; p < end; ++p) {
    float score = 0;
    for (int64_t d = 0; d < dim; ++d) {
      score += q[d] * key(p, d);
    }
    scores.push_back(score);
    best = std::max(best, score);
  }
  float sum = 0;
  for (float& score : scores) {
    score = std::exp(score - best);
    sum += score;
  }
  for (int64_t d = 0; d < dim; ++d) {
    float mixed = 0;
    for (int64_t p = first; p < end; ++p) {
      mixed += scores[static_cast<size_t>(p - first)] * value(p, d);
    }
    out[d] = scores.empty() ? 0 : mixed / sum;
  }
}

// A short convolution: `window` is [C, Kc + 1], the token itself last.
[[gnu::noinline]] inline void convolve(const Floats& weights,
                                       const float* window, int64_t taps,
                                       float* out) {
  for (int c = 0; c < kChannels; ++c) {
    float sum = 0;
    for (int64_t j = 0; j <= taps; ++j) {
      const auto at = static_cast<size_t>(c * (taps + 1) + j);
      sum += weights[at] * window[at];
    }
    out[c] = std::tanh(sum);
  }
}

// A gated delta rule: decays `state` [key, value], writes one value, reads.
[[gnu::noinline]] inline void delta_rule(const Floats& gates,
                                         const float* hidden, const float* qkv,
                                         float* state, float* out) {
  float gate[2];
  project(gates, hidden, kWidth, gate, 2);
  const float decay = 1 / (1 + std::exp(-gate[0]));
  const float beta = 1 / (1 + std::exp(-gate[1]));
  const float *q = qkv, *k = qkv + kKey, *v = k + kKey;
  for (int j = 0; j < kValue; ++j) {
    float held = 0;
    for (int i = 0; i < kKey; ++i) {
      state[i * kValue + j] *= decay;
      held += state[i * kValue + j] * k[i];
    }
    out[j] = 0;
    for (int i = 0; i < kKey; ++i) {
      state[i * kValue + j] += beta * k[i] * (v[j] - held);
      out[j] += state[i * kValue + j] * q[i];
    }
  }
}

// --- the forward ------------------------------------------------------------

// Reads and writes elements of a float32 or bfloat16 tensor by strides.
struct Elements {
  explicit Elements(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        half(tensor.scalar_type() == at::kBFloat16),
        strides(tensor.strides().vec()) {}
  int64_t at(std::initializer_list<int64_t> index) const {
    int64_t offset = 0;
    size_t i = 0;
    for (const int64_t n : index) {
      offset += n * strides[i++];
    }
    return offset;
  }
  float get(std::initializer_list<int64_t> index) const {
    const int64_t i = at(index);
    return half ? static_cast<float>(reinterpret_cast<c10::BFloat16*>(data)[i])
                : reinterpret_cast<float*>(data)[i];
  }
  void set(std::initializer_list<int64_t> index, float value) const {
    const int64_t i = at(index);
    if (half) {
      reinterpret_cast<c10::BFloat16*>(data)[i] = value;
    } else {
      reinterpret_cast<float*>(data)[i] = value;
    }
  }
  char* data;
  bool half;
  std::vector<int64_t> strides;
};

enum class Stage { kBeforeLayer, kAfterWrite, kAfterLayer };

struct ForwardOptions {
  // Writes through reserve() and the pointers of state(), as a fused decode
  // does, instead of update() and extend_conv().
  bool fused = false;
  at::ScalarType dtype = at::kFloat, conv_dtype = at::kFloat;
  std::function<void(int64_t layer, Stage stage)> hook = {};
};

// One forward of a step; `ids` [rows * tokens] with kDead for padding. Returns
// the hidden states [rows, tokens, E]. Does not commit.
class Forward {
 public:
  Forward(const Model& model, Step& step, std::span<const int> ids,
          const ForwardOptions& options)
      : model_(model),
        step_(step),
        options_(options),
        rows_(step.rows()),
        tokens_(step.tokens()),
        hidden_(static_cast<size_t>(rows_ * tokens_ * kWidth)) {
    const auto* position = step.positions().data_ptr<int64_t>();
    for (int64_t i = 0; i < rows_ * tokens_; ++i) {
      embed(model, ids[static_cast<size_t>(i)], position[i], at(i));
    }
  }

  Floats run() {
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const int64_t number = model_.first_layer + static_cast<int64_t>(i);
      call(number, Stage::kBeforeLayer);
      if (const auto* a = std::get_if<AttentionLayer>(&model_.layers[i])) {
        attention(*a, model_.weights[i], number);
      } else {
        recurrent(std::get<RecurrentLayer>(model_.layers[i]), model_.weights[i],
                  number);
      }
      call(number, Stage::kAfterLayer);
    }
    return hidden_;
  }

 private:
  float* at(int64_t token) { return hidden_.data() + token * kWidth; }
  void call(int64_t layer, Stage stage) const {
    if (options_.hook) {
      options_.hook(layer, stage);
    }
  }
  bool live(int64_t row, int64_t t) const {
    return step_.limits().data_ptr<int64_t>()[row * tokens_ + t] > 0;
  }

  void attention(const AttentionLayer& layer, const Model::Weights& weights,
                 int64_t number) {
    const int64_t heads = layer.heads, dim = layer.head_dim;
    const Tensor k = at::empty({rows_, heads, tokens_, dim}, options_.dtype);
    const Tensor v = at::empty({rows_, heads, tokens_, dim}, options_.dtype);
    const Elements keys(k), values(v);
    Floats queries;
    Floats qkv(static_cast<size_t>(3 * heads * dim));
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t t = 0; t < tokens_; ++t) {
        project(weights.in, at(row * tokens_ + t), kWidth, qkv.data(),
                static_cast<int>(qkv.size()));
        queries.insert(queries.end(), qkv.begin(), qkv.begin() + heads * dim);
        for (int64_t i = 0; i < heads * dim; ++i) {
          keys.set({row, i / dim, t, i % dim}, qkv[heads * dim + i]);
          values.set({row, i / dim, t, i % dim}, qkv[2 * heads * dim + i]);
        }
      }
    }
    const KvView& view =
        options_.fused ? step_.reserve(number) : step_.update(number, k, v);
    if (options_.fused) {
      write(view, keys, values, heads, dim);
    }
    call(number, Stage::kAfterWrite);
    Floats mixed(static_cast<size_t>(heads * dim));
    for (int64_t i = 0; i < rows_ * tokens_; ++i) {
      read(view, i, queries.data() + i * heads * dim, heads, dim, mixed);
      add_output(weights.out, mixed.data(), static_cast<int>(heads * dim),
                 at(i));
    }
  }

  void write(const KvView& view, const Elements& keys, const Elements& values,
             int64_t heads, int64_t dim) const {
    const Elements k(view.k), v(view.v);
    const auto* cell = view.cells.data_ptr<int64_t>();
    for (int64_t i = 0; i < rows_ * tokens_; ++i) {
      for (int64_t n = 0; n < heads * dim && live(i / tokens_, i % tokens_);
           ++n) {
        const int64_t row = i / tokens_, t = i % tokens_;
        k.set({row, n / dim, cell[i], n % dim},
              keys.get({row, n / dim, t, n % dim}));
        v.set({row, n / dim, cell[i], n % dim},
              values.get({row, n / dim, t, n % dim}));
      }
    }
  }

  // What token `i` reads, by the view's own words.
  void read(const KvView& view, int64_t i, const float* q, int64_t heads,
            int64_t dim, Floats& mixed) const {
    const Elements k(view.k), v(view.v);
    const int64_t end = view.limits.data_ptr<int64_t>()[i];
    const int64_t first =
        view.sliding > 0 ? std::max<int64_t>(0, end - view.sliding) : 0;
    const int64_t row = i / tokens_;
    const auto cell = [&](int64_t p) {
      return view.ring > 0 ? p % view.ring : p;
    };
    for (int64_t h = 0; h < heads; ++h) {
      attend_head(
          q + h * dim, dim, first, end,
          [&](int64_t p, int64_t d) {
            return k.get({row, h, cell(p), d});
          },
          [&](int64_t p, int64_t d) {
            return v.get({row, h, cell(p), d});
          },
          mixed.data() + h * dim);
    }
  }

  void recurrent(const RecurrentLayer& layer, const Model::Weights& weights,
                 int64_t number) {
    const int64_t taps = layer.conv_taps;
    const bool conv = layer.conv_channels > 0;
    const bool has_state = !layer.state_shape.empty();
    const Tensor x =
        at::empty({rows_, kChannels, tokens_}, options_.conv_dtype);
    const Elements inputs(x);
    std::vector<Floats> channels(static_cast<size_t>(rows_ * tokens_),
                                 Floats(kChannels));
    for (int64_t i = 0; i < rows_ * tokens_; ++i) {
      Floats& c = channels[static_cast<size_t>(i)];
      project(weights.in, at(i), kWidth, c.data(), kChannels);
      for (int64_t n = 0; n < kChannels; ++n) {
        inputs.set({i / tokens_, n, i % tokens_}, c[static_cast<size_t>(n)]);
      }
    }
    const StateView* view = nullptr;
    if (has_state || options_.fused) {
      view = &step_.state(number);
    }
    Tensor extended;
    if (conv && !options_.fused) {
      extended = step_.extend_conv(number, x);
    }
    call(number, Stage::kAfterWrite);
    for (int64_t row = 0; row < rows_; ++row) {
      if (conv) {
        conv_row(weights, row, taps, inputs, extended, view, channels);
      }
      state_row(weights, row, has_state ? view : nullptr, channels);
    }
  }

  // Convolves the live tokens of a row; a fused one keeps the tail itself.
  void conv_row(const Model::Weights& weights, int64_t row, int64_t taps,
                const Elements& inputs, const Tensor& extended,
                const StateView* view, std::vector<Floats>& channels) const {
    std::vector<Floats> history(kChannels);  // saved and live, without gaps
    if (!extended.defined()) {
      const Elements saved(view->conv);
      for (int64_t c = 0; c < kChannels; ++c) {
        for (int64_t j = 0; j < taps; ++j) {
          history[static_cast<size_t>(c)].push_back(saved.get({row, c, j}));
        }
      }
    }
    Floats window(static_cast<size_t>(kChannels * (taps + 1)));
    for (int64_t t = 0; t < tokens_; ++t) {
      if (!live(row, t)) {
        continue;
      }
      for (int64_t c = 0; c < kChannels; ++c) {
        Floats& line = history[static_cast<size_t>(c)];
        if (!extended.defined()) {
          line.push_back(inputs.get({row, c, t}));
        }
        for (int64_t j = 0; j <= taps; ++j) {
          window[static_cast<size_t>(c * (taps + 1) + j)] =
              extended.defined() ? Elements(extended).get({row, c, t + j})
                                 : line[line.size() - 1 - (taps - j)];
        }
      }
      convolve(weights.conv, window.data(), taps,
               channels[static_cast<size_t>(row * tokens_ + t)].data());
    }
    if (!extended.defined()) {
      const Elements next(view->next_conv);
      for (int64_t c = 0; c < kChannels; ++c) {
        const Floats& line = history[static_cast<size_t>(c)];
        for (int64_t j = 0; j < taps; ++j) {
          next.set({row, c, j}, line[line.size() - taps + j]);
        }
      }
    }
  }

  void state_row(const Model::Weights& weights, int64_t row,
                 const StateView* view, std::vector<Floats>& channels) {
    float state[kKey * kValue];
    bool any = false;
    for (int n = 0; n < kKey * kValue && view != nullptr; ++n) {
      state[n] = Elements(view->state).get({row, n / kValue, n % kValue});
    }
    for (int64_t t = 0; t < tokens_; ++t) {
      if (!live(row, t)) {
        continue;
      }
      any = true;
      const int64_t i = row * tokens_ + t;
      const Floats& c = channels[static_cast<size_t>(i)];
      float read[kValue];
      if (view != nullptr) {
        delta_rule(weights.gates, at(i), c.data(), state, read);
        add_output(weights.out, read, kValue, at(i));
      } else {
        add_output(weights.out, c.data(), kChannels, at(i));
      }
    }
    for (int n = 0; n < kKey * kValue && view != nullptr; ++n) {
      // What an idle row leaves there must not matter.
      Elements(view->next_state)
          .set({row, n / kValue, n % kValue},
               any ? state[n] : std::numeric_limits<float>::quiet_NaN());
    }
  }

  const Model& model_;
  Step& step_;
  const ForwardOptions& options_;
  int64_t rows_, tokens_;
  Floats hidden_;
};

inline Floats forward(const Model& model, Step& step, std::span<const int> ids,
                      const ForwardOptions& options = {}) {
  return Forward(model, step, ids, options).run();
}

}  // namespace kvcache::toy
