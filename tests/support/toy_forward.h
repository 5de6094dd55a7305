// support/toy_forward.h - the toy model's forward, which sees a cache only as a
// Step. A token id of kDead has NaN for an embedding.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "tests/support/toy_arithmetic.h"
#include "tests/support/toy_views.h"

namespace kvcache::toy {

enum class Stage { kBeforeLayer, kAfterWrite, kAfterLayer };

struct ForwardOptions {
  // Writes through reserve() and the pointers of state(), as a fused decode
  // does, instead of update() and extend_conv().
  bool fused = false;
  at::ScalarType dtype = at::kFloat, conv_dtype = at::kFloat;
  std::function<void(int64_t layer, Stage stage)> hook = {};
  // Fills a state window where one is wanted; a forward that has never heard of
  // them does not.
  bool fill_window = true;
  const float* hidden = nullptr;  // [rows * tokens, E] in place of embeddings
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
    if (options.hidden != nullptr) {
      std::copy_n(options.hidden, hidden_.size(), hidden_.data());
      return;
    }
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
      read_view(view, i / tokens_, i, queries.data() + i * heads * dim, heads,
                dim, mixed);
      add_output(weights.out, mixed.data(), static_cast<int>(heads * dim),
                 at(i));
    }
  }

  void write(const KvView& view, const Elements& keys, const Elements& values,
             int64_t heads, int64_t dim) const {
    const auto* cell = view.cells.data_ptr<int64_t>();
    for (int64_t i = 0; i < rows_ * tokens_; ++i) {
      const int64_t row = i / tokens_, t = i % tokens_;
      for (int64_t h = 0; h < heads && live(row, t); ++h) {
        write_cell(view.k, view.k_scale, {row, h, cell[i]}, keys, t, dim);
        write_cell(view.v, view.v_scale, {row, h, cell[i]}, values, t, dim);
      }
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
    const StateWindow* window =
        options_.fill_window ? step_.state_window(number) : nullptr;
    for (int64_t row = 0; row < rows_; ++row) {
      if (conv) {
        conv_row(weights, row, taps, inputs, extended, view, window, channels);
      }
      state_row(weights, row, has_state ? view : nullptr, window, channels);
    }
  }

  // Convolves the live tokens of a row; a fused one keeps the tail itself.
  void conv_row(const Model::Weights& weights, int64_t row, int64_t taps,
                const Elements& inputs, const Tensor& extended,
                const StateView* view, const StateWindow* window,
                std::vector<Floats>& channels) const {
    std::vector<Floats> history(kChannels);  // saved and live, without gaps
    if (!extended.defined()) {
      const Elements saved(view->conv);
      for (int64_t c = 0; c < kChannels; ++c) {
        for (int64_t j = 0; j < taps; ++j) {
          history[static_cast<size_t>(c)].push_back(saved.get({row, c, j}));
        }
      }
    }
    Floats seen(static_cast<size_t>(kChannels * (taps + 1)));
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
          seen[static_cast<size_t>(c * (taps + 1) + j)] =
              extended.defined() ? Elements(extended).get({row, c, t + j})
                                 : line[line.size() - 1 - (taps - j)];
        }
      }
      if (!extended.defined() && window != nullptr) {
        keep_inputs(row, t, taps, seen, *window);
      }
      convolve(weights.conv, seen.data(), taps,
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

  // Of a token and those before it, as the convolution sees them.
  static void keep_inputs(int64_t row, int64_t t, int64_t taps,
                          const Floats& seen, const StateWindow& window) {
    const Elements columns(window.conv);
    for (int64_t c = 0; c < kChannels; ++c) {
      for (int64_t j = 0; j <= taps; ++j) {
        columns.set({row, c, t + j},
                    seen[static_cast<size_t>(c * (taps + 1) + j)]);
      }
    }
  }

  void state_row(const Model::Weights& weights, int64_t row,
                 const StateView* view, const StateWindow* window,
                 std::vector<Floats>& channels) {
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
        for (int n = 0; n < kKey * kValue && window != nullptr; ++n) {
          Elements(window->state)
              .set({row, t, n / kValue, n % kValue}, state[n]);
        }
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
