// config.cpp - bounds of a configuration and its rotary
// frequencies.

#include "kvcache/model/config.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

#include "src/model/weights/config_bounds.h"

namespace kvcache::model {
namespace {

template <typename... Parts>
void require(bool holds, const std::string& source, const Parts&... parts) {
  TORCH_CHECK(holds, "[ModelConfig] ", source, ": ", parts...,
              "; the file is damaged or of a model that is not supported.");
}

struct Bound {
  const char* name;  // field, with the words that files use for it
  int64_t value;
  int64_t most;
};

void check_rope(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  require(config.head_dim % 2 == 0, config.source,
          "head_dim (attention.key_length) must be even for rotary positions "
          "but is ",
          config.head_dim);
  require(rope.rotary_dim >= 2 && rope.rotary_dim % 2 == 0 &&
              rope.rotary_dim <= config.head_dim,
          config.source,
          "rotary_dim (rope.dimension_count) must be even and 2 to head_dim ",
          config.head_dim, " but is ", rope.rotary_dim);
  require(std::isfinite(rope.theta) && rope.theta > 0.0, config.source,
          "rope_theta (rope.freq_base) must be above 0 but is ", rope.theta);
  require(std::isfinite(rope.factor) && rope.factor > 0.0, config.source,
          "the rope scaling factor must be above 0 but is ", rope.factor);
  if (rope.scaling == RopeScaling::kLlama3) {
    require(rope.low_freq_factor > 0.0 &&
                rope.high_freq_factor > rope.low_freq_factor &&
                std::isfinite(rope.high_freq_factor),
            config.source, "high_freq_factor ", rope.high_freq_factor,
            " must be above low_freq_factor ", rope.low_freq_factor,
            ", and that above 0");
    require(rope.original_context > 0, config.source,
            "original_max_position_embeddings must be above 0 but is ",
            rope.original_context);
  }
  require(rope.divisors.empty() ||
              static_cast<int64_t>(rope.divisors.size()) * 2 == rope.rotary_dim,
          config.source, "rope_freqs.weight must have ", rope.rotary_dim / 2,
          " values but has ", rope.divisors.size());
  for (const float divisor : rope.divisors) {
    require(std::isfinite(divisor) && divisor > 0.0F, config.source,
            "values of rope_freqs.weight must be above 0 but one is ", divisor);
  }
}

void check_layers(const ModelConfig& config) {
  require(static_cast<int64_t>(config.layer_types.size()) == config.layers,
          config.source, "layer_types must have ", config.layers,
          " entries but has ", config.layer_types.size());
  for (const LayerType type : config.layer_types) {
    require(type != LayerType::kSliding || config.sliding_window.has_value(),
            config.source,
            "layer_types has sliding layers but there is no sliding_window");
    require(type != LayerType::kLinear || config.linear_attention.has_value(),
            config.source,
            "layer_types has linear layers but their sizes are missing");
  }
  require(!config.sliding_window || *config.sliding_window > 0, config.source,
          "sliding_window must be above 0 but is ",
          config.sliding_window.value_or(0));
}

void check_linear(const ModelConfig& config) {
  if (!config.linear_attention) return;
  const LinearAttentionConfig& linear = *config.linear_attention;
  const Bound bounds[] = {
      {"linear_num_key_heads (ssm.group_count)", linear.key_heads, kMaxHeads},
      {"linear_num_value_heads (ssm.time_step_rank)", linear.value_heads,
       kMaxHeads},
      {"linear_key_head_dim (ssm.state_size)", linear.key_head_dim,
       kMaxLinearHeadDim},
      {"linear_value_head_dim (ssm.inner_size / ssm.time_step_rank)",
       linear.value_head_dim, kMaxLinearHeadDim}};
  for (const Bound& bound : bounds) {
    require(bound.value >= 1 && bound.value <= bound.most, config.source,
            bound.name, " must be 1 to ", bound.most, " but is ", bound.value);
  }
  require(linear.conv_kernel >= kMinConvKernel &&
              linear.conv_kernel <= kMaxConvKernel,
          config.source, "linear_conv_kernel_dim (ssm.conv_kernel) must be ",
          kMinConvKernel, " to ", kMaxConvKernel, " but is ",
          linear.conv_kernel);
  require(linear.value_heads % linear.key_heads == 0, config.source,
          "linear_num_value_heads ", linear.value_heads,
          " must be a multiple of linear_num_key_heads ", linear.key_heads);
}

}  // namespace

void ModelConfig::validate() const {
  const Bound bounds[] = {
      {"vocab_size", vocab_size, kMaxVocabulary},
      {"hidden_size (n_embd, embedding_length)", hidden_size, kMaxSize},
      {"num_hidden_layers (n_layer, block_count)", layers, kMaxLayers},
      {"num_attention_heads (n_head, attention.head_count)", heads, kMaxHeads},
      {"num_key_value_heads (attention.head_count_kv)", kv_heads, kMaxHeads},
      {"head_dim (attention.key_length)", head_dim, kMaxSize},
      {"intermediate_size (n_inner, feed_forward_length)", intermediate_size,
       kMaxSize},
      {"max_position_embeddings (n_positions, context_length)", context_length,
       kMaxContext}};
  for (const Bound& bound : bounds) {
    require(bound.value >= 1 && bound.value <= bound.most, source, bound.name,
            " must be 1 to ", bound.most, " but is ", bound.value);
  }
  require(heads % kv_heads == 0, source, "num_attention_heads ", heads,
          " must be a multiple of num_key_value_heads ", kv_heads);
  require(std::isfinite(norm_eps) && norm_eps >= 0.0 && norm_eps < 1.0, source,
          "the epsilon of the norms must be 0 to 1 but is ", norm_eps);
  require(!attention_scale ||
              (std::isfinite(*attention_scale) && *attention_scale > 0.0),
          source, "the attention scale must be above 0 but is ",
          attention_scale.value_or(0.0));
  if (positions == Positions::kRotary) check_rope(*this);
  check_layers(*this);
  check_linear(*this);
  for (const int64_t id : eos_ids) {
    require(id >= 0 && id < vocab_size, source, "eos_token_id must be 0 to ",
            vocab_size - 1, " but is ", id);
  }
  require(!bos_id || (*bos_id >= 0 && *bos_id < vocab_size), source,
          "bos_token_id must be 0 to ", vocab_size - 1, " but is ",
          bos_id.value_or(0));
}

namespace {

// Long waves are slowed down by `factor`, short ones stay, and those between
// are blended. Source: _compute_llama3_parameters of transformers.
double llama3_frequency(double frequency, const RopeConfig& rope) {
  const double turns = static_cast<double>(rope.original_context) * frequency /
                       (2.0 * std::numbers::pi);  // in the original context
  if (turns < rope.low_freq_factor) return frequency / rope.factor;
  if (turns > rope.high_freq_factor) return frequency;
  const double blend = (turns - rope.low_freq_factor) /
                       (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - blend) * frequency / rope.factor + blend * frequency;
}

}  // namespace

std::vector<float> inverse_frequencies(const RopeConfig& rope) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rope.rotary_dim; i += 2) {
    double frequency =
        std::pow(rope.theta, -static_cast<double>(i) /
                                 static_cast<double>(rope.rotary_dim));
    if (rope.scaling == RopeScaling::kLinear) frequency /= rope.factor;
    if (rope.scaling == RopeScaling::kLlama3)
      frequency = llama3_frequency(frequency, rope);
    if (!rope.divisors.empty())
      frequency /= static_cast<double>(rope.divisors[frequencies.size()]);
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

}  // namespace kvcache::model
