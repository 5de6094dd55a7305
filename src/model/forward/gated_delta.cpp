// src/model/forward/gated_delta.cpp - the gated delta rule: live ranges, rows
// and heads on threads.
#include "src/model/forward/gated_delta.h"

#include <ATen/Parallel.h>

#include <cstring>
#include <memory>
#include <vector>

#include "src/kernels/cpu_level.h"
#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

using kernels::CpuLevel;

// Kept per thread, so that a steady decode allocates nothing.
float* thread_scratch(int64_t floats) {
  constexpr size_t kAlignment = 64;
  static thread_local std::vector<float> buffer;
  const size_t spare = kAlignment / sizeof(float);
  const size_t wanted = static_cast<size_t>(floats) + spare;
  if (buffer.size() < wanted) buffer.resize(wanted);
  void* from = buffer.data();
  size_t room = buffer.size() * sizeof(float);
  return static_cast<float*>(std::align(
      kAlignment, static_cast<size_t>(floats) * sizeof(float), from, room));
}

// The first live token of each row and how many there are.
struct LiveRange {
  int64_t first = 0, count = 0;
};

LiveRange live_range(const TokenSpans& tokens, int64_t row) {
  LiveRange found;
  for (int64_t t = 0; t < tokens.per_row; ++t) {
    if (!tokens.live(row * tokens.per_row + t)) continue;
    if (found.count++ == 0) found.first = t;
  }
  return found;
}

template <typename T>
DeltaRow<T> row_of(const StateView& memory, int64_t row) {
  const auto conv = [&](const Tensor& of) {
    return data_of<T>(of) + row * of.stride(0);
  };
  const auto state = [&](const Tensor& of) {
    return of.data_ptr<float>() + row * of.stride(0);
  };
  DeltaRow<T> made;
  made.conv = conv(memory.conv);
  made.next_conv = conv(memory.next_conv);
  made.state = state(memory.state);
  made.next_state = state(memory.next_state);
  return made;
}

// Channels [first, end) of a row's inputs: the saved ones, then the live
// tokens' from column Kc on. `to`: of channel 0, channels `stride` apart.
template <typename T>
void keep_inputs(const DeltaLayer& layer, const DeltaRow<T>& row, int64_t first,
                 int64_t end, T* to, int64_t stride) {
  const int64_t saved = layer.taps - 1;
  for (int64_t c = first; c < end; ++c) {
    T* line = to + c * stride;
    for (int64_t j = 0; j < saved; ++j) line[j] = row.conv[c * saved + j];
    const T* in = row.in + c;
    for (int64_t t = 0; t < row.tokens; ++t, in += layer.inputs()) {
      line[saved + t] = *in;
    }
  }
}

}  // namespace

template <>
const DeltaKernel<float>& delta_kernel<float>() {
#ifdef KVCACHE_ROW_LOOPS_X86
  if (kernels::cpu_level() >= CpuLevel::kAvx512) return avx512::float_delta();
  if (kernels::cpu_level() >= CpuLevel::kAvx2) return avx2::float_delta();
#endif
  return portable::float_delta();
}

template <>
const DeltaKernel<Bf16>& delta_kernel<Bf16>() {
#ifdef KVCACHE_ROW_LOOPS_X86
  if (kernels::cpu_level() >= CpuLevel::kAvx512) {
    return avx512::bfloat16_delta();
  }
  if (kernels::cpu_level() >= CpuLevel::kAvx2) return avx2::bfloat16_delta();
#endif
  return portable::bfloat16_delta();
}

GatedDeltaCore::GatedDeltaCore(const ModelConfig& config,
                               const DeltaWeights& weights)
    : weights_(weights) {
  const LinearAttentionConfig& sizes = *config.linear_attention;
  weights_.conv = weights.conv.t().contiguous();
  layer_.key_heads = sizes.key_heads;
  layer_.groups = sizes.value_heads / sizes.key_heads;
  layer_.key_dim = sizes.key_head_dim;
  layer_.value_dim = sizes.value_head_dim;
  layer_.taps = sizes.conv_kernel;
  layer_.eps = static_cast<float>(config.norm_eps);
  layer_.conv = weights_.conv.const_data_ptr<float>();
  layer_.decay = weights_.decay.const_data_ptr<float>();
  layer_.dt_bias = weights_.dt_bias.const_data_ptr<float>();
  layer_.norm = weights_.norm.const_data_ptr<float>();
}

void GatedDeltaCore::run(const TokenSpans& tokens, const Tensor& in,
                         const StateView& memory, const Tensor& out,
                         const StateWindow* window) const {
  std::vector<LiveRange> live;
  int64_t most = 0;
  for (int64_t row = 0; row < tokens.rows; ++row) {
    live.push_back(live_range(tokens, row));
    most = std::max(most, live.back().count);
  }
  const int64_t state_values = layer_.key_dim * layer_.value_dim;
  with_row_type(in.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const DeltaKernel<T>& kernel = delta_kernel<T>();
    const T* from = data_of<T>(in);
    T* to = data_of<T>(out);
    for (int64_t i = 0; i < tokens.count(); ++i) {
      if (tokens.live(i)) continue;
      std::memset(to + i * outputs(), 0,
                  static_cast<size_t>(outputs()) * sizeof(T));
    }
    const auto run_of = [&](int64_t row) {
      const LiveRange range = live[static_cast<size_t>(row)];
      const int64_t first = row * tokens.per_row + range.first;
      DeltaRow<T> run = row_of<T>(memory, row);
      run.tokens = range.count;
      run.in = from + first * inputs();
      run.out = to + first * outputs();
      if (window != nullptr) {
        run.window = window->state.data_ptr<float>() +
                     row * window->state.stride(0) +
                     range.first * window->state.stride(1);
        run.window_stride = window->state.stride(1);
      }
      return run;
    };
    const auto for_each_head = [&](const auto& work) {
      for_each_row(tokens.rows * layer_.key_heads,
                   most * layer_.groups * state_values, [&](int64_t i) {
                     const int64_t row = i / layer_.key_heads;
                     if (live[static_cast<size_t>(row)].count > 0) {
                       work(row, i % layer_.key_heads);
                     }
                   });
    };
    if (window != nullptr) {  // before a next conv in place overwrites it
      const int64_t share = layer_.channels() / layer_.key_heads;
      for_each_head([&](int64_t row, int64_t head) {
        T* columns = data_of<T>(window->conv) + row * window->conv.stride(0) +
                     live[static_cast<size_t>(row)].first;
        keep_inputs(layer_, run_of(row), head * share, (head + 1) * share,
                    columns, window->conv.stride(1));
      });
    }
    for_each_head([&](int64_t row, int64_t head) {
      kernel.run(layer_, run_of(row), head,
                 thread_scratch(kernel.scratch(layer_)));
    });
  });
}

}  // namespace kvcache::model
