// kernels/attention_schedule.h - attend()'s work, spread over threads.
#pragma once

#include "kernels/attention_kernels.h"

namespace kvcache::kernels {

// The bits of the result are the same either way.
enum class AttentionSplit : uint8_t {
  kKeys,    // few queries: threads share the blocks of keys
  kQueries  // many queries: threads share the queries
};

// Runs `call` at this machine's CPU level on at most at::get_num_threads()
// threads. Reuses memory of the thread that calls it.
void run_attention(const AttentionCall& call, AttentionSplit split);

}  // namespace kvcache::kernels
