// support/toy_model.h - a toy language model of attention and recurrent layers:
// its variants and weights. E hidden numbers a token.
#pragma once

#include <cstdint>
#include <random>
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
    case Variant::kMixed: {
      AttentionLayer pinned = wide;
      pinned.sinks = 2;
      return {conv, narrow, state, delta, pinned};
    }
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

}  // namespace kvcache::toy
