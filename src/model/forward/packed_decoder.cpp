// src/model/forward/packed_decoder.cpp - the CPU's decoder: packed linears, own
// loops, one order of additions whatever runs together.
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "src/model/forward/blocks.h"
#include "src/model/forward/decoder.h"
#include "src/model/forward/fused_layers.h"
#include "src/model/forward/head.h"
#include "src/model/forward/loader.h"
#include "src/model/forward/low_rank.h"
#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

std::span<const int64_t> values_of(const Tensor& numbers) {
  return {numbers.const_data_ptr<int64_t>(),
          static_cast<size_t>(numbers.numel())};
}

// The tokens that the caller wants an output of, row by row; -1 where one is
// dead or named by no number.
std::vector<int64_t> wanted_tokens(const TokenSpans& tokens,
                                   const ForwardOptions& options) {
  const int64_t T = tokens.per_row, outputs = outputs_per_row(options, T);
  const Tensor chosen = options.logit_positions.defined()
                            ? options.logit_positions.contiguous()
                            : Tensor();
  std::vector<int64_t> wanted;
  for (int64_t row = 0; row < tokens.rows; ++row) {
    int64_t last = T - 1;
    while (last > 0 && !tokens.live(row * T + last)) --last;
    for (int64_t i = 0; i < outputs; ++i) {
      int64_t t = outputs == T ? i : last;
      if (chosen.defined()) {
        t = chosen.const_data_ptr<int64_t>()[row * outputs + i];
      }
      wanted.push_back(t >= 0 && tokens.live(row * T + t) ? row * T + t : -1);
    }
  }
  return wanted;
}

// A step of so many tokens gives its scratch, some 20 KB a token, back.
constexpr int64_t kTrimmedTokens = 128;

// Memory that was freed goes back to the system.
void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Packs linears, and asks of each shape whether it is row-exact.
class Packer {
 public:
  Packer(Loader& loader, const DecoderParts& parts)
      : loader_(loader),
        source_(*parts.source),
        packing_(parts.packing),
        options_(parts.options) {}

  Linear operator()(LinearWeights weights) {
    Linear made = weights.rows.empty() ? dense(std::move(weights))
                                       : Linear(tiles(weights));
    loader_.finished();
    return made;
  }
  bool row_exact() const { return row_exact_; }
  size_t tile_bytes() const { return tile_bytes_; }

 private:
  Linear dense(LinearWeights weights) {
    PackedLinear made(weights.weight, weights.bias, arena_);
    weights = {};
    probe(made);
    return Linear(std::move(made));
  }
  TiledLinear tiles(const LinearWeights& weights) {
    TiledLinear made(source_, weights.rows, weights.bias, packing_, arena_);
    tile_bytes_ += made.bytes();
    return made;
  }

  // Equal shapes run the same code: one of each is enough.
  void probe(const PackedLinear& linear) {
    if (!row_exact_) return;
    if (!probed_.emplace(linear.outputs(), linear.inputs()).second) return;
    row_exact_ = linear.probe_row_exact();
    if (row_exact_ || !options_.log) return;
    options_.log(LogLevel::kWarning,
                 c10::str("the ", linear.outputs(), " x ", linear.inputs(), " ",
                          linear.dtype(),
                          " linear is not row-exact on this CPU: results may "
                          "depend on how many rows run together"));
  }

  Loader& loader_;
  const WeightSource& source_;
  WeightPacking packing_;
  const LoadOptions& options_;
  bool row_exact_ = true;
  TileArena arena_;
  size_t tile_bytes_ = 0;
  std::set<std::pair<int64_t, int64_t>> probed_;  // outputs, inputs
};

std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, Loader& loader,
                                  Packer& pack, int64_t index) {
  if (config.layer_types[static_cast<size_t>(index)] == LayerType::kLinear) {
    GatedDelta::Parts parts;
    parts.inputs = pack(loader.delta_inputs(index));
    parts.weights = loader.delta(index);
    parts.output = pack(loader.delta_output(index));
    return std::make_unique<GatedDelta>(config, std::move(parts));
  }
  Attention::Parts parts;
  parts.qkv = pack(loader.qkv(index));
  parts.output = pack(loader.attention_output(index));
  if (config.qk_norm) {
    parts.q_norm.emplace(config, loader.q_norm(index));
    parts.k_norm.emplace(config, loader.k_norm(index));
  }
  return std::make_unique<Attention>(config, std::move(parts));
}

Layer make_layer(const ModelConfig& config, Loader& loader, Packer& pack,
                 int64_t index) {
  Normalisation mixer_norm(config, loader.attention_norm(index));
  std::unique_ptr<Mixer> mixer = make_mixer(config, loader, pack, index);
  Normalisation feed_forward_norm(config, loader.feed_forward_norm(index));
  Linear up = pack(loader.up(index));
  Linear down = pack(loader.down(index));
  return {std::move(mixer_norm), std::move(mixer), std::move(feed_forward_norm),
          FeedForward(config, std::move(up), std::move(down))};
}

class PackedDecoder final : public Decoder {
 public:
  explicit PackedDecoder(const DecoderParts& parts);
  Tensor run(const Tokens& tokens, LayerMemory& memory,
             const ForwardOptions& options) const override;
  bool row_exact() const noexcept override { return row_exact_; }
  // One arithmetic for both.
  bool roles_agree() const noexcept override { return true; }
  size_t weight_bytes() const noexcept override { return weight_bytes_; }
  std::shared_ptr<const DecoderAdapters> prepare(
      const std::vector<Adapter>& adapters) const override {
    return std::make_shared<PackedAdapters>(adapters, config_);
  }

 private:
  // Returns what the last block adds to pass.hidden; undefined: nothing more.
  Tensor run_layers(Pass& pass, int64_t first, int64_t last) const;
  void embed(const Pass& pass) const;
  void enter(const Pass& pass, const Tensor& given) const;
  void write_hidden(const Pass& pass, const Tensor& delta,
                    const std::vector<int64_t>& wanted, const Tensor& to) const;
  void write_logits(const Pass& pass, const Tensor& delta,
                    const std::vector<int64_t>& wanted, const Tensor& logit_ids,
                    const Tensor& logits) const;

  const ModelConfig& config_;
  std::shared_ptr<const WeightSource> source_;  // embeddings are read from it
  Arithmetic arithmetic_;
  std::vector<float> frequencies_;  // empty: learned positions
  Head head_;
  std::vector<Layer> layers_;
  std::optional<Normalisation> final_norm_;
  size_t weight_bytes_ = 0;
  bool row_exact_ = false;
};

PackedDecoder::PackedDecoder(const DecoderParts& parts)
    : config_(parts.config),
      source_(parts.source),
      arithmetic_{parts.packed() ? at::kFloat : parts.dtype, parts.dtype,
                  !parts.packed() && PackedLinear::packs(parts.dtype)} {
  if (config_.positions == Positions::kRotary) {
    frequencies_ = inverse_frequencies(config_.rope);
  }
  Loader loader(config_, *source_, arithmetic_.dtype, parts.options,
                parts.packed());
  Packer pack(loader, parts);
  // The largest first, while little else is there.
  LinearWeights head = loader.head();
  const Tensor head_bias = head.bias;
  head_ = Head(pack(std::move(head)), loader.head_name() + ".weight", head_bias,
               source_);
  for (int64_t i = 0; i < config_.layers; ++i) {
    layers_.push_back(make_layer(config_, loader, pack, i));
  }
  final_norm_.emplace(config_, loader.final_norm());
  weight_bytes_ = loader.bytes() + pack.tile_bytes();
  row_exact_ = pack.row_exact();
  trim_heap();
}

// Dead tokens are 0, whatever their ids.
void PackedDecoder::embed(const Pass& pass) const {
  const TokenSpans& tokens = pass.tokens;
  const int64_t width = config_.hidden_size;
  auto* hidden = data_of<float>(pass.hidden);
  const bool learned = config_.positions == Positions::kLearned;
  constexpr int64_t kCost = 8;  // dequantising takes longer than a plain pass
  for_each_row(tokens.count(), kCost * width, [&](int64_t i) {
    float* row = hidden + i * width;
    const auto at = static_cast<size_t>(i);
    if (!tokens.live(i)) {
      std::fill(row, row + width, 0.0F);
      return;
    }
    source_->read_rows(kEmbedding, tokens.ids[at], 1, row);
    if (!learned) return;
    std::vector<float> position(static_cast<size_t>(width));
    source_->read_rows(kPositions, tokens.positions[at], 1, position.data());
    for (int64_t j = 0; j < width; ++j) {
      row[j] += position[static_cast<size_t>(j)];
    }
  });
}

// The same with rows of `given` [B, T, hidden_size] in place of embeddings.
void PackedDecoder::enter(const Pass& pass, const Tensor& given) const {
  const Tensor from = given.contiguous();
  const auto row_bytes =
      static_cast<size_t>(config_.hidden_size) * sizeof(float);
  auto* to = static_cast<char*>(pass.hidden.data_ptr());
  const auto* rows = static_cast<const char*>(from.const_data_ptr());
  for (size_t i = 0; i < static_cast<size_t>(pass.tokens.count()); ++i) {
    char* row = to + i * row_bytes;
    if (pass.tokens.live(static_cast<int64_t>(i))) {
      std::memcpy(row, rows + i * row_bytes, row_bytes);
    } else {
      std::memset(row, 0, row_bytes);
    }
  }
}

void PackedDecoder::write_hidden(const Pass& pass, const Tensor& delta,
                                 const std::vector<int64_t>& wanted,
                                 const Tensor& to) const {
  const int64_t width = config_.hidden_size;
  const auto* hidden = pass.hidden.const_data_ptr<float>();
  auto* out = to.data_ptr<float>();
  with_row_type(arithmetic_.dtype, [&](auto type) {
    using T = decltype(type);
    const auto add = row_loops<T>().add;
    for_each_row(static_cast<int64_t>(wanted.size()), width, [&](int64_t i) {
      const int64_t token = wanted[static_cast<size_t>(i)];
      if (token < 0) return;
      float* row = out + i * width;
      std::copy_n(hidden + token * width, width, row);
      if (delta.defined()) add(row, data_of<T>(delta) + token * width, width);
    });
  });
}

void PackedDecoder::write_logits(const Pass& pass, const Tensor& delta,
                                 const std::vector<int64_t>& wanted,
                                 const Tensor& logit_ids,
                                 const Tensor& logits) const {
  const int64_t width = config_.hidden_size, columns = logits.size(2);
  const NormParameters norm = final_norm_->parameters();
  const auto* hidden = pass.hidden.const_data_ptr<float>();
  std::vector<int64_t> outputs;  // of a token that lives
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] >= 0) outputs.push_back(static_cast<int64_t>(i));
  }
  std::vector<float> residual(static_cast<size_t>(width));
  with_row_type(arithmetic_.dtype, [&](auto type) {
    using T = decltype(type);
    const RowLoops<T>& loops = row_loops<T>();
    const T* added = delta.defined() ? data_of<T>(delta) : nullptr;
    for (size_t first = 0; first < outputs.size(); first += kHeadRows) {
      const std::span<const int64_t> chunk = std::span(outputs).subspan(
          first, std::min<size_t>(kHeadRows, outputs.size() - first));
      const auto rows = static_cast<int64_t>(chunk.size());
      const Tensor normed = at::zeros(
          {arithmetic_.pads_rows ? PackedLinear::padded_rows(rows) : rows,
           width},
          at::TensorOptions(arithmetic_.dtype));
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t token =
            wanted[static_cast<size_t>(chunk[static_cast<size_t>(i)])];
        // A copy: a token may be wanted twice.
        std::copy_n(hidden + token * width, width, residual.data());
        loops.add_norm(data_of<T>(normed) + i * width, residual.data(),
                       added == nullptr ? nullptr : added + token * width, norm,
                       width);
      }
      const Tensor scores = logit_ids.defined()
                                ? head_(normed, values_of(logit_ids))
                                : head_(normed);
      for_each_row(rows, columns, [&](int64_t i) {
        loops.to_float(
            data_of<float>(logits) + chunk[static_cast<size_t>(i)] * columns,
            data_of<T>(scores) + i * columns, columns);
      });
    }
  });
}

Tensor PackedDecoder::run(const Tokens& tokens, LayerMemory& memory,
                          const ForwardOptions& options) const {
  const Tensor ids = tokens.ids.contiguous();
  const Tensor positions = tokens.positions.contiguous();
  const Tensor limits = tokens.limits.contiguous();
  const TokenSpans spans{ids.size(0), ids.size(1), values_of(ids),
                         values_of(positions), values_of(limits)};
  const std::vector<int64_t> wanted = wanted_tokens(spans, options);
  // Made outside of inference mode, so that a caller may change it in place.
  Tensor out = at::zeros({spans.rows, outputs_per_row(options, spans.per_row),
                          output_width(options, config_)},
                         at::TensorOptions(at::kFloat));
  {
    const c10::InferenceMode inference;
    Pass pass(config_, frequencies_, spans, memory, options.role, arithmetic_);
    std::optional<TokenAdapters> adapters;
    if (tokens.adapters != nullptr) {
      adapters.emplace(static_cast<const PackedAdapters&>(*tokens.adapters),
                       spans, options);
      if (adapters->any()) pass.adapters = &*adapters;
    }
    if (options.hidden.defined()) {
      enter(pass, options.hidden);
    } else {
      embed(pass);
    }
    const Tensor delta =
        run_layers(pass, options.first_layer, *options.last_layer);
    if (options.return_hidden) {
      write_hidden(pass, delta, wanted, out);
    } else {
      write_logits(pass, delta, wanted, options.logit_ids, out);
    }
  }
  if (spans.count() >= kTrimmedTokens) trim_heap();
  return out;
}

Tensor PackedDecoder::run_layers(Pass& pass, int64_t first,
                                 int64_t last) const {
  const int64_t tokens = pass.tokens.count();
  const auto few = std::span(layers_).subspan(
      static_cast<size_t>(first), static_cast<size_t>(last - first));
  if (FusedLayers::serves(pass, few)) {
    FusedLayers(pass, few).run(first);
    return {};
  }
  Tensor delta;
  for (int64_t i = first; i < last; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    layer.mixer_norm.add_and_apply(pass.normed, pass.hidden, delta, tokens);
    delta = layer.mixer->run(pass, i);
    layer.feed_forward_norm.add_and_apply(pass.normed, pass.hidden, delta,
                                          tokens);
    delta = layer.feed_forward.run(pass, i);
  }
  return delta;
}

}  // namespace

std::unique_ptr<Decoder> make_packed_decoder(const DecoderParts& parts) {
  return std::make_unique<PackedDecoder>(parts);
}

}  // namespace kvcache::model
