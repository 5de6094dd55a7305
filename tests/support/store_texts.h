// Texts for a CheckpointStore without a model: every state and every K says
// which tokens, and of upper parts which route, it stands for.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvcache/checkpoint_store.h"

namespace kvcache::fake {

using Ids = std::vector<int64_t>;

// n tokens of their own for each seed.
inline Ids ids(int64_t n, int64_t seed = 0) {
  Ids tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), 1000 * seed);
  return tokens;
}

inline Ids operator+(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Ids first(const Ids& tokens, int64_t n) {
  return {tokens.begin(), tokens.begin() + n};
}

struct Make {
  std::vector<int64_t> positions = {};  // empty: the end
  bool states = true;
  bool attention = true;
  int64_t parts = 1;
  std::string route = {};
  int64_t state_size = 4;  // float32 values
  int64_t block = 4;
  std::vector<std::pair<int64_t, int64_t>> decoded = {};
  int64_t multiple = 1;
  std::vector<int64_t> hidden = {};    // positions with a final hidden state
  std::vector<int64_t> features = {};  // positions with a router's sum
  std::string world = {};              // whatever else results depend on
  at::ScalarType dtype = at::kFloat;
};

// Exact in float32.
inline float stands_for(const Ids& tokens, int64_t n, const std::string& what) {
  uint32_t hash = 2166136261U;
  const auto add = [&hash](uint64_t value) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 16777619U;
  };
  for (const char letter : what) add(static_cast<unsigned char>(letter));
  for (int64_t i = 0; i < n; ++i) add(static_cast<uint64_t>(tokens[i]) + 1);
  return static_cast<float>(hash >> 9U);
}

inline std::string what_of(const Make& make, int64_t part) {
  return make.world + (part > 0 || make.parts == 1 ? "/" + make.route : "");
}

inline std::vector<LayerSpec> layers_of(const Make& make) {
  std::vector<LayerSpec> layers;
  if (make.attention) {
    layers.emplace_back(AttentionLayer{.heads = 1, .head_dim = 2});
  }
  if (make.states) {
    layers.emplace_back(RecurrentLayer{.state_shape = {make.state_size}});
  }
  return layers;
}

inline Tensor values(int64_t n, float value) { return at::full({1, n}, value); }

inline float value_of(const Tensor& values) {
  return values.flatten()[0].item<float>();
}

inline std::shared_ptr<const KvBlock> block_of(const Ids& tokens, int64_t from,
                                               int64_t count,
                                               const std::string& what,
                                               at::ScalarType dtype) {
  auto block = std::make_shared<KvBlock>();
  block->first = from;
  block->tokens = count;
  const Tensor both = at::empty({2, 1, count, 2}, dtype);
  for (int64_t t = 0; t < count; ++t) {
    both.select(2, t).fill_(stands_for(tokens, from + t + 1, what));
  }
  block->kv.push_back({.k = both.select(0, 0), .v = both.select(0, 1)});
  return block;
}

inline std::vector<int64_t> positions_of(const Ids& tokens, const Make& make) {
  return make.positions.empty()
             ? std::vector<int64_t>{static_cast<int64_t>(tokens.size())}
             : make.positions;
}

inline Checkpoint part_of(const Ids& tokens, const Make& make, int64_t part,
                          const Checkpoint* shared, int64_t same) {
  const auto n = static_cast<int64_t>(tokens.size());
  const std::string what = what_of(make, part);
  Checkpoint result{.length = n,
                    .first_layer = 10 * part,
                    .layers = layers_of(make),
                    .dtype = make.dtype};
  int64_t end = 0;
  if (shared != nullptr) {
    for (const auto& block : shared->blocks) {
      const int64_t last = block->first + block->tokens;
      if (last > same || last % make.block != 0) break;
      result.blocks.push_back(block);
      end = last;
    }
  }
  while (make.attention && end < n) {
    const int64_t count =
        std::min(n, end - end % make.block + make.block) - end;
    result.blocks.push_back(block_of(tokens, end, count, what, make.dtype));
    end += count;
  }
  for (const int64_t position : positions_of(tokens, make)) {
    if (!make.states) break;
    result.points.push_back(std::make_shared<const RestorePoint>(RestorePoint{
        .position = position,
        .conv = {},
        .state = values(make.state_size, stands_for(tokens, position, what))}));
  }
  return result;
}

inline StoredText text_of(const Ids& tokens, const Make& make,
                          const Hit* hit = nullptr) {
  StoredText text{.decoded = make.decoded, .restore_multiple = make.multiple};
  for (int64_t part = 0; part < make.parts; ++part) {
    const bool shares = hit != nullptr && hit->text != nullptr;
    text.parts.push_back(part_of(tokens, make, part,
                                 shares ? &hit->text->parts[part] : nullptr,
                                 shares ? hit->position : 0));
  }
  std::vector<int64_t> extras = make.hidden;
  extras.insert(extras.end(), make.features.begin(), make.features.end());
  std::sort(extras.begin(), extras.end());
  extras.erase(std::unique(extras.begin(), extras.end()), extras.end());
  for (const int64_t position : extras) {
    PointExtras at{.position = position};
    const auto listed = [position](const std::vector<int64_t>& in) {
      return std::find(in.begin(), in.end(), position) != in.end();
    };
    const float value = stands_for(tokens, position, make.world);
    if (listed(make.hidden)) at.final_hidden = values(2, value);
    if (listed(make.features)) at.features = values(2, value);
    text.extras.push_back(std::move(at));
  }
  return text;
}

// An upper estimate of what text_of() allocates.
inline size_t most_bytes(const Ids& tokens, const Make& make) {
  const size_t kv = make.attention ? 16 * tokens.size() : 0;
  const size_t state = make.states ? 4 * static_cast<size_t>(make.state_size) *
                                         positions_of(tokens, make).size()
                                   : 0;
  return static_cast<size_t>(make.parts) * (kv + state) +
         8 * (make.hidden.size() + make.features.size());
}

inline PutRequest request_of(const Ids& tokens, const Make& make,
                             const Namespace& space = {}) {
  PutRequest request;
  request.tokens = tokens;
  request.space = space;
  request.route = make.route;
  request.bytes = most_bytes(tokens, make);
  request.positions = positions_of(tokens, make);
  return request;
}

inline PutResult put(CheckpointStore& store, const Ids& tokens,
                     const Make& make = {}, const Namespace& space = {}) {
  return store.put(request_of(tokens, make, space),
                   [&] { return text_of(tokens, make); });
}

// Empty if all that the hit restores is of these tokens, else what is not.
inline std::string wrong_in(const Hit& hit, const Ids& tokens,
                            const Make& make) {
  for (int64_t part = 0; hit.text != nullptr && part < make.parts; ++part) {
    const Checkpoint& from = hit.text->parts.at(static_cast<size_t>(part));
    const std::string what = what_of(make, part);
    int64_t end = 0;
    for (const auto& block : from.blocks) {
      for (int64_t t = 0; t < block->tokens && end < hit.position; ++t, ++end) {
        const Tensor& k = block->kv.at(0).k;
        if (value_of(k.select(1, t)) != stands_for(tokens, end + 1, what)) {
          return "K of token " + std::to_string(end);
        }
      }
    }
    if (make.attention && end < hit.position) return "K/V is short";
    bool found = !make.states;
    for (const auto& point : from.points) {
      if (point->position != hit.position) continue;
      found = value_of(point->state) == stands_for(tokens, hit.position, what);
    }
    if (!found) return "the state of part " + std::to_string(part);
  }
  return hit.text == nullptr && hit.position > 0 ? "no text" : "";
}

inline constexpr size_t kPlenty = size_t{1} << 24U;

inline StoreOptions plenty(int64_t min_prefix = 1) {
  return {.max_bytes = kPlenty, .min_prefix = min_prefix};
}

inline Hit look(CheckpointStore& store, const Ids& tokens,
                const Namespace& space = {},
                std::optional<std::string> route = {}, bool deferred = false) {
  LookupRequest request;
  request.tokens = tokens;
  request.space = space;
  request.route = std::move(route);
  request.deferred = deferred;
  return store.lookup(request);
}

// One checkpoint and nothing else: 16 bytes.
inline const Make kPoint = {.attention = false, .state_size = 4};
inline constexpr size_t kPointBytes = 16;
inline const Make kAttentionOnly = {.states = false};

inline StoreOptions of_points(size_t points) {
  return {.max_bytes = points * kPointBytes, .min_prefix = 1};
}

// Without a trace in the order or the statistics.
inline int64_t position_of(CheckpointStore& store, const Ids& tokens,
                           const Namespace& space = {}) {
  return look(store, tokens + ids(1, 99), space, {}, true).position;
}

inline std::vector<int64_t> seeds_in(CheckpointStore& store, int64_t seeds) {
  std::vector<int64_t> there;
  for (int64_t seed = 0; seed < seeds; ++seed) {
    if (position_of(store, ids(4, seed)) > 0) there.push_back(seed);
  }
  return there;
}

}  // namespace kvcache::fake
