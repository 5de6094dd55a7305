// src/model/forward/low_rank.cpp - adapters beside the linears of a decoder.
#include "src/model/forward/low_rank.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

// Rows of q's projection with gates are [heads, q | gate, head_dim].
std::vector<LowRank> q_and_gates(const ModelConfig& config, const Tensor& a,
                                 const Tensor& b) {
  const Tensor heads = b.view({config.heads, 2, config.head_dim, b.size(1)});
  const auto half = [&](int64_t which) {
    return heads.select(1, which).reshape({config.query_size(), b.size(1)});
  };
  return {{0, a, half(0)},
          {config.query_size() + 2 * config.kv_size(), a, half(1)}};
}

struct Place {
  std::string_view name;
  LinearPlace place;
  int64_t first;
};

// Source: the orders of rows that Loader stacks.
Place place_of(std::string_view name, const ModelConfig& config) {
  using enum LinearPlace;
  const LinearAttentionConfig linear =
      config.linear_attention.value_or(LinearAttentionConfig());
  const int64_t z = linear.conv_channels(), beta = z + linear.value_size();
  const Place places[] = {
      {"attn_q", kMixerInputs, 0},
      {"attn_k", kMixerInputs, config.query_size()},
      {"attn_v", kMixerInputs, config.query_size() + config.kv_size()},
      {"attn_qkv", kMixerInputs, 0},
      {"attn_gate", kMixerInputs, z},
      {"ssm_beta", kMixerInputs, beta},
      {"ssm_alpha", kMixerInputs, beta + linear.value_heads},
      {"attn_output", kMixerOutput, 0},
      {"ssm_out", kMixerOutput, 0},
      {"ffn_gate", kUp, 0},
      {"ffn_up", kUp, config.gated_mlp ? config.intermediate_size : 0},
      {"ffn_down", kDown, 0}};
  const auto* const found =
      std::find_if(std::begin(places), std::end(places),
                   [&](const Place& place) { return place.name == name; });
  TORCH_CHECK(found != std::end(places), "[Transformer::with_adapters] ",
              std::string(name), " is no linear of a layer.");
  return *found;
}

}  // namespace

PlacedModule placed(const AdapterModule& module, const ModelConfig& config) {
  std::string_view name = module.weight;  // "blk.3.attn_q.weight"
  name.remove_suffix(name.size() - name.rfind('.'));
  name.remove_prefix(name.rfind('.') + 1);
  const Place place = place_of(name, config);
  PlacedModule made{layer_of(module), place.place, {}};
  if (name == "attn_q" && config.output_gate) {
    made.parts = q_and_gates(config, module.a, module.b);
  } else {
    made.parts = {{place.first, module.a, module.b}};
  }
  return made;
}

PackedAdapters::PackedAdapters(const std::vector<Adapter>& adapters,
                               const ModelConfig& config) {
  for (const Adapter& adapter : adapters) {
    auto& layers = layers_.emplace_back(static_cast<size_t>(config.layers));
    for (const AdapterModule& module : adapter.modules) {
      const PlacedModule from = placed(module, config);
      auto& to = layers[static_cast<size_t>(from.layer)]
                       [static_cast<size_t>(from.place)];
      for (const LowRank& part : from.parts) {
        to.push_back({part.first, part.a, part.b.t().contiguous()});
      }
    }
  }
}

TokenAdapters::TokenAdapters(const PackedAdapters& adapters,
                             const TokenSpans& tokens,
                             const ForwardOptions& options)
    : adapters_(adapters), of_token_(static_cast<size_t>(tokens.count()), -1) {
  const Tensor chosen = options.adapters.contiguous();
  const Tensor from = options.adapters_from.defined()
                          ? options.adapters_from.contiguous()
                          : at::zeros({tokens.rows}, chosen.options());
  for (int64_t i = 0; i < tokens.count(); ++i) {
    const int64_t row = i / tokens.per_row;
    const auto at = static_cast<size_t>(i);
    if (tokens.live(i) &&
        tokens.positions[at] >= from.const_data_ptr<int64_t>()[row]) {
      of_token_[at] = chosen.const_data_ptr<int64_t>()[row];
    }
  }
}

bool TokenAdapters::any() const {
  return std::any_of(of_token_.begin(), of_token_.end(),
                     [](int64_t adapter) { return adapter >= 0; });
}

void TokenAdapters::add(int64_t layer, LinearPlace place, const Tensor& x,
                        const Tensor& y) const {
  const int64_t inputs = x.size(1), outputs = y.size(1);
  constexpr int64_t kRank = 32;  // of an adapter of usual size, to share work
  with_row_type(y.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(x);
    T* to = data_of<T>(y);
    const auto add_low_rank = row_loops<T>().add_low_rank;
    const auto count = static_cast<int64_t>(of_token_.size());
    for_each_row(count, kRank * (inputs + outputs), [&](int64_t i) {
      const int64_t adapter = of_token_[static_cast<size_t>(i)];
      if (adapter < 0) return;
      for (const LowRank& part : adapters_.parts(adapter, layer, place)) {
        const int64_t rank = part.a.size(0);
        std::vector<float> between(static_cast<size_t>(rank));
        add_low_rank(
            to + i * outputs + part.first, from + i * inputs,
            {part.a.const_data_ptr<float>(), part.b.const_data_ptr<float>(),
             inputs, rank, part.b.size(1)},
            between.data());
      }
    });
  });
}

OpsAdapters::OpsAdapters(const std::vector<Adapter>& adapters,
                         const ModelConfig& config, at::Device device)
    : count_(static_cast<int64_t>(adapters.size())),
      layers_(static_cast<size_t>(config.layers)) {
  const auto options = at::TensorOptions(at::kFloat).device(device);
  int64_t rank = 0;
  for (const Adapter& adapter : adapters) {
    for (const AdapterModule& module : adapter.modules) {
      rank = std::max(rank, module.a.size(0));
    }
  }
  for (int64_t n = 0; n < count_; ++n) {
    for (const AdapterModule& module :
         adapters[static_cast<size_t>(n)].modules) {
      const PlacedModule from = placed(module, config);
      auto& to = layers_[static_cast<size_t>(from.layer)]
                        [static_cast<size_t>(from.place)];
      for (const LowRank& low : from.parts) {
        auto part = std::find_if(to.begin(), to.end(), [&](const Part& known) {
          return known.first == low.first;
        });
        if (part == to.end()) {
          to.push_back({low.first,
                        at::zeros({count_, rank, low.a.size(1)}, options),
                        at::zeros({count_, low.b.size(0), rank}, options)});
          part = to.end() - 1;
        }
        const int64_t own = low.a.size(0);
        part->a.select(0, n).narrow(0, 0, own).copy_(low.a);
        part->b.select(0, n).narrow(1, 0, own).copy_(low.b);
      }
    }
  }
}

RowAdapters::RowAdapters(const OpsAdapters& adapters, const Tensor& positions,
                         const ForwardOptions& options)
    : adapters_(adapters),
      index_(options.adapters.clamp(0, adapters.count() - 1)),
      on_(options.adapters.ge(0).unsqueeze(1).expand_as(positions)) {
  if (options.adapters_from.defined()) {
    on_ = on_.logical_and(positions.ge(options.adapters_from.unsqueeze(1)));
  }
  on_ = on_.unsqueeze(-1);
}

void RowAdapters::add(int64_t layer, LinearPlace place, const Tensor& x,
                      const Tensor& y) const {
  const auto& parts = adapters_.parts(layer, place);
  if (parts.empty()) return;
  const Tensor wide = x.to(at::kFloat);
  for (const OpsAdapters::Part& part : parts) {
    const Tensor a = part.a.index_select(0, index_).transpose(1, 2);
    const Tensor b = part.b.index_select(0, index_).transpose(1, 2);
    const Tensor columns = y.narrow(2, part.first, part.b.size(1));
    const Tensor own = columns.to(at::kFloat);
    const Tensor with = own.add(at::bmm(at::bmm(wide, a), b));
    columns.copy_(at::where(on_, with, own));
  }
}

}  // namespace kvcache::model
