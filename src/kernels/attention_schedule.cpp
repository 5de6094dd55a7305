// kernels/attention_schedule.cpp - which thread does what.

#include "kernels/attention_schedule.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels/cpu_level.h"
#include "kernels/scratch_buffer.h"

namespace kvcache::kernels {
namespace {

void* thread_scratch(int64_t bytes) {
  static thread_local ScratchBuffer buffer;
  return buffer.at_least(static_cast<size_t>(bytes));
}

const AttentionKernels& kernels_of(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::kAvx2:
    case CpuLevel::kAvxVnni:
      return attention_avx2();
    case CpuLevel::kAvx512:
      return attention_avx512();
    case CpuLevel::kAvx512Bf16:
      return attention_avx512_bf16();
    case CpuLevel::kAmx:
      return attention_amx();
#endif
    default:
      return attention_portable();
  }
}

// The keys that at least one query of [first, first + tokens) sees lie within
// [begin, end) or are among the first `sinks`.
struct KeySpan {
  int64_t begin = 0, end = 0;
  int64_t sinks = 0;
};

int64_t limit_of(const AttentionCall& call, int64_t row, int64_t token) {
  return call.limits[row * call.limits_row + token * call.limits_token];
}

int64_t begin_of(const AttentionCall& call, int64_t limit) {
  const int64_t begin =
      call.sliding > 0 ? std::max<int64_t>(0, limit - call.sliding) : 0;
  return std::max(begin, call.sinks);  // those are apart
}

int64_t sinks_of(const AttentionCall& call, int64_t limit) {
  return std::min(call.sinks, limit);
}

KeySpan keys_seen(const AttentionCall& call, int64_t row, int64_t first,
                  int64_t tokens) {
  KeySpan seen;
  for (int64_t t = first; t < first + tokens; ++t) {
    const int64_t limit = limit_of(call, row, t);
    seen.sinks = std::max(seen.sinks, sinks_of(call, limit));
    const int64_t begin = begin_of(call, limit);
    if (begin >= limit) continue;
    seen.begin = seen.end == 0 ? begin : std::min(seen.begin, begin);
    seen.end = std::max(seen.end, limit);
  }
  return seen;
}

// Runs f(thread) for `threads` threads; inline if there is one.
template <class F>
void on_threads(int64_t threads, const F& f) {
  if (threads <= 1) return f(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// A thread is worth waking for this many multiplications of q and k: some 5 us
// of work with 8 lanes, while waking one that still spins takes 2.
constexpr int64_t kWorkOfThread = 24 * 1024;

int64_t threads_for(int64_t work) {
  return std::clamp<int64_t>(work / kWorkOfThread, 1, at::get_num_threads());
}

// --- few queries -----------------------------------------------------------

struct KeyTask {
  int64_t pair;  // row * heads + head
  int64_t block;
  int64_t begin, keys;  // read by it
};

// A row and a key/value head whose blocks are folded by whoever is last.
struct HeadParts {
  int64_t first_block = 0, tasks = 0;
  int64_t offset = 0;  // of its partial results, in floats
  std::atomic<int64_t> missing{0};
};

// Rows without gaps as one.
MemoryRows joined(MemoryRows rows) {
  if (rows.step != rows.bytes || rows.rows == 0) return rows;
  return {rows.first, 1, rows.rows * rows.bytes, rows.rows * rows.bytes};
}

class KeySplit {
 public:
  // All rows from first_row on whose partial results fit into kMostFloats, one
  // at least. Returns the row behind them.
  int64_t run(const AttentionCall& call, const AttentionKernels& kernels,
              int64_t first_row);

 private:
  static constexpr int64_t kMostFloats = 4 << 20;

  void add_row(const AttentionCall& call, KeySpan seen);
  float* parts_of(const KeyTask& task) const;
  void run_tasks(int64_t begin, int64_t end);
  int64_t task_at(int64_t keys) const;
  MemoryRows rows_of(const KeyTask& task, bool values) const;
  MemoryAhead memory_ahead(int64_t i, int64_t end) const;
  void ask_first(const KeyTask& task) const;

  const AttentionCall* call_ = nullptr;
  const AttentionKernels* kernels_ = nullptr;
  int64_t block_floats_ = 0, floats_ = 0, keys_ = 0, first_row_ = 0;
  float* parts_ = nullptr;
  bool by_position_ = false;
  std::vector<KeyTask> tasks_;
  std::vector<HeadParts> heads_;
  int64_t heads_used_ = 0;
  ScratchBuffer buffer_;
};

void KeySplit::add_row(const AttentionCall& call, KeySpan seen) {
  const int64_t first = seen.begin / kKeyBlock;
  const int64_t blocks = (seen.end + kKeyBlock - 1) / kKeyBlock - first;
  const int64_t sinks = seen.sinks > 0 ? 1 : 0;  // a block before the first
  const int64_t base = heads_used_;
  for (int64_t h = 0; h < call.heads; ++h) {
    HeadParts& head = heads_[heads_used_++];
    head.first_block = first;
    head.tasks = sinks + blocks;
    head.offset = floats_;
    head.missing.store(head.tasks, std::memory_order_relaxed);
    floats_ += head.tasks * block_floats_;
  }
  const auto add = [&](int64_t h, int64_t i) {
    if (i < 0) {
      tasks_.push_back({base + h, kSinkBlock, 0, seen.sinks});
      keys_ += seen.sinks;
      return;
    }
    const int64_t begin = std::max(seen.begin, (first + i) * kKeyBlock);
    const int64_t end = std::min(seen.end, (first + i + 1) * kKeyBlock);
    tasks_.push_back({base + h, first + i, begin, end - begin});
    keys_ += end - begin;
  };
  if (by_position_) {
    for (int64_t i = -sinks; i < blocks; ++i) {
      for (int64_t h = 0; h < call.heads; ++h) add(h, i);
    }
  } else {
    for (int64_t h = 0; h < call.heads; ++h) {
      for (int64_t i = -sinks; i < blocks; ++i) add(h, i);
    }
  }
}

// Where the partial results of a task go: see AttentionKernels::fold.
float* KeySplit::parts_of(const KeyTask& task) const {
  const HeadParts& head = heads_[task.pair];
  const int64_t place =
      task.block == kSinkBlock
          ? 0
          : task.block - head.first_block + (call_->sinks > 0 ? 1 : 0);
  return parts_ + head.offset + place * block_floats_;
}

// The task that `keys` keys of earlier tasks precede.
int64_t KeySplit::task_at(int64_t keys) const {
  int64_t before = 0, i = 0;
  const int64_t count = static_cast<int64_t>(tasks_.size());
  while (i < count && before + tasks_[i].keys / 2 < keys) {
    before += tasks_[i++].keys;
  }
  return i;
}

// Keys or values of a task, or of all heads at its positions.
MemoryRows KeySplit::rows_of(const KeyTask& task, bool values) const {
  const AttentionCall& call = *call_;
  const int64_t size = call.element_bytes;
  const int64_t cell = values ? call.v_cell : call.k_cell;
  const int64_t between_heads = values ? call.v_head : call.k_head;
  const int64_t head = by_position_ ? 0 : task.pair % call.heads;
  const int64_t first = (first_row_ + task.pair / call.heads) *
                            (values ? call.v_row : call.k_row) +
                        head * between_heads + task.begin * cell;
  return {
      .first =
          static_cast<const char*>(values ? call.v : call.k) + size * first,
      .rows = task.keys,
      .step = size * cell,
      .bytes = call.key_bytes +
               (by_position_ ? (call.heads - 1) * between_heads * size : 0)};
}

// What task i asks for. Head by head: its own values, then the keys of the
// task after it. If the heads of a position lie together: its share of the
// keys and values of all heads in the block after its own.
MemoryAhead KeySplit::memory_ahead(int64_t i, int64_t end) const {
  if (call_->ring > 0) return {};
  if (!by_position_) {
    return {joined(rows_of(tasks_[i], true)),
            i + 1 < end ? joined(rows_of(tasks_[i + 1], false)) : MemoryRows{}};
  }
  const int64_t head = tasks_[i].pair % call_->heads;
  const int64_t next = i + call_->heads - head;  // head 0 of the block after it
  if (next >= end) return {};
  const auto share = [&](bool values) {
    MemoryRows rows = rows_of(tasks_[next], values);
    const int64_t first = rows.rows * head / call_->heads;
    rows.first += first * rows.step;
    rows.rows = rows.rows * (head + 1) / call_->heads - first;
    return joined(rows);
  };
  return {share(false), share(true)};
}

// A thread's first keys: nobody asked for them.
void KeySplit::ask_first(const KeyTask& task) const {
  if (call_->ring > 0) return;
  for (const bool values : {false, true}) {
    if (values && !by_position_) continue;
    const MemoryRows rows = rows_of(task, values);
    for (int64_t r = 0; r < rows.rows; ++r) {
      for (int64_t at = 0; at < rows.bytes; at += 64) {
        __builtin_prefetch(rows.first + r * rows.step + at);
      }
    }
  }
}

void KeySplit::run_tasks(int64_t begin, int64_t end) {
  const AttentionCall& call = *call_;
  void* scratch = thread_scratch(kernels_->scratch_bytes(call, call.tokens));
  static thread_local std::vector<int64_t> done;  // tasks, per head
  done.assign(static_cast<size_t>(heads_used_), 0);
  const auto range_of = [&](int64_t pair) {
    return QueryRange{.row = first_row_ + pair / call.heads,
                      .head = pair % call.heads,
                      .first = 0,
                      .tokens = call.tokens};
  };
  if (begin < end) ask_first(tasks_[begin]);
  for (int64_t i = begin; i < end; ++i) {
    const KeyTask& task = tasks_[i];
    kernels_->part(call, range_of(task.pair), task.block, parts_of(task),
                   memory_ahead(i, end), scratch);
    ++done[task.pair];
  }
  // Once per head and thread, not once per task: the counters are shared.
  for (int64_t pair = 0; pair < heads_used_; ++pair) {
    if (done[pair] == 0) continue;
    HeadParts& head = heads_[pair];
    if (head.missing.fetch_sub(done[pair], std::memory_order_acq_rel) ==
        done[pair]) {
      kernels_->fold(call, range_of(pair), head.first_block, block_floats_,
                     parts_ + head.offset, scratch);
    }
  }
}

int64_t KeySplit::run(const AttentionCall& call,
                      const AttentionKernels& kernels, int64_t first_row) {
  call_ = &call;
  kernels_ = &kernels;
  first_row_ = first_row;
  // Memory likes to be read in the order of its addresses.
  by_position_ = call.k_head < call.k_cell && call.v_head < call.v_cell;
  block_floats_ = call.tokens * call.group * kernels.part_floats(call);
  tasks_.clear();
  floats_ = keys_ = heads_used_ = 0;
  const auto wanted = static_cast<size_t>(call.rows * call.heads);
  if (heads_.size() < wanted) heads_ = std::vector<HeadParts>(wanted);
  int64_t row = first_row;
  for (; row < call.rows; ++row) {
    const KeySpan seen = keys_seen(call, row, 0, call.tokens);
    const int64_t floats =
        ((seen.end - seen.begin) / kKeyBlock + 3) * block_floats_ * call.heads;
    if (row > first_row && floats_ + floats > kMostFloats) break;
    add_row(call, seen);
  }
  parts_ = static_cast<float*>(
      buffer_.at_least(static_cast<size_t>(floats_) * sizeof(float)));
  // A row that sees nothing has no task: fold writes its zeros.
  for (int64_t i = 0; i < heads_used_; ++i) {
    if (heads_[i].tasks > 0) continue;
    kernels.fold(call,
                 {.row = first_row + i / call.heads,
                  .head = i % call.heads,
                  .first = 0,
                  .tokens = call.tokens},
                 0, block_floats_, parts_,
                 thread_scratch(kernels.scratch_bytes(call, call.tokens)));
  }
  const int64_t threads =
      threads_for(keys_ * call.tokens * call.group * call.head_dim);
  on_threads(threads, [&](int64_t i) {
    run_tasks(task_at(keys_ * i / threads),
              i + 1 == threads ? static_cast<int64_t>(tasks_.size())
                               : task_at(keys_ * (i + 1) / threads));
  });
  return row;
}

// --- many queries ----------------------------------------------------------

struct QueryTask {
  QueryRange range;
  int64_t work;
};

// Enough queries to pay for packing a block of keys, few enough that threads
// end together.
int64_t queries_of_task(const AttentionCall& call) {
  const int64_t tasks = 8 * at::get_num_threads();
  const int64_t fair =
      call.rows * call.heads * call.tokens / std::max<int64_t>(tasks, 1);
  return std::clamp<int64_t>(fair, 16, 64);
}

void split_by_queries(const AttentionCall& call,
                      const AttentionKernels& kernels) {
  static thread_local std::vector<QueryTask> tasks;
  tasks.clear();
  const int64_t most = queries_of_task(call);
  int64_t total = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t t = 0; t < call.tokens; t += most) {
      const int64_t tokens = std::min(most, call.tokens - t);
      int64_t work = 0;
      for (int64_t i = t; i < t + tokens; ++i) {
        const int64_t limit = limit_of(call, row, i);
        const int64_t keys =
            std::max<int64_t>(0, limit - begin_of(call, limit)) +
            sinks_of(call, limit);
        work += keys * call.group * call.head_dim;
      }
      for (int64_t head = 0; head < call.heads; ++head) {
        tasks.push_back({{row, head, t, tokens}, work});
        total += work;
      }
    }
  }
  std::stable_sort(
      tasks.begin(), tasks.end(),
      [](const QueryTask& a, const QueryTask& b) { return a.work > b.work; });
  std::atomic<size_t> next{0};
  const std::vector<QueryTask>& shared = tasks;  // of this thread, for all
  on_threads(threads_for(total), [&](int64_t) {
    void* scratch = thread_scratch(kernels.scratch_bytes(call, most));
    for (size_t i = next++; i < shared.size(); i = next++) {
      kernels.queries(call, shared[i].range, scratch);
    }
  });
}

}  // namespace

void run_attention(const AttentionCall& call, AttentionSplit split) {
  if (call.rows == 0 || call.tokens == 0) return;
  const AttentionKernels& kernels = kernels_of(cpu_level());
  if (split == AttentionSplit::kQueries) {
    split_by_queries(call, kernels);
    return;
  }
  static thread_local KeySplit keys;
  for (int64_t row = 0; row < call.rows;) row = keys.run(call, kernels, row);
}

}  // namespace kvcache::kernels
