// Memory: the hot path allocates nothing, the report adds up, no view keeps
// old memory alive, and a failing allocation changes nothing.
#include <bit>
#include <cstdlib>
#include <set>

#include "tests/support/toy_contract.h"

namespace kvcache::toy {
namespace {

class MemoryTest : public ContractTest {
 protected:
  TestAllocator& memory = TestAllocator::install();
};
KVCACHE_CONTRACT(MemoryTest);

// One step that writes constants: no tensor of the caller's is made inside.
struct Inputs {
  Inputs(const Model& model, const CacheSpec& spec, int64_t tokens) {
    for (const LayerSpec& layer : model.layers) {
      if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
        kv.push_back(
            at::empty({spec.rows, a->heads, tokens, a->head_dim}, spec.dtype)
                .fill_(0.5));
      } else {
        kv.emplace_back();
      }
    }
  }
  std::vector<Tensor> kv;
};

void run_step(Cache& cache, const Inputs& inputs, const StepSpec& spec) {
  Step step = cache.begin_step(spec);
  for (size_t i = 0; i < inputs.kv.size(); ++i) {
    const auto layer = cache.spec().first_layer + static_cast<int64_t>(i);
    if (inputs.kv[i].defined()) {
      step.update(layer, inputs.kv[i], inputs.kv[i]);
    } else {
      step.state(layer);
    }
  }
  step.commit();
}

// Promise 10: steady decode of the in-place kinds allocates no storage, plain,
// with idle rows, after verbs that keep the addresses, and through reserve().
TEST_P(MemoryTest, SteadyDecodeAllocatesNothing) {
  if (!kind.in_place || kind.by_ops) {
    return;
  }
  const std::unique_ptr<Cache> cache = make(64);
  if (kind.growing) {
    preallocated(*cache)->reserve(64);
  }
  const Inputs inputs(model, cache->spec(), 1);
  run_step(*cache, inputs, {});
  std::vector<int64_t> some(rows, 1);
  some[0] = 0;
  const uint64_t epoch = cache->address_epoch();
  const int64_t before = memory.allocations;
  for (int i = 0; i < 20; ++i) {
    run_step(*cache, inputs, {});
    run_step(*cache, inputs, {.count = some});
    if (i == 7) {
      cache->drop_last(3);
    }
    if (i == 14) {
      cache->reset(0);
    }
    { const Step abandoned = cache->begin_step(); }
  }
  EXPECT_EQ(memory.allocations, before);
  EXPECT_EQ(cache->address_epoch(), epoch);
}

// Bytes of the step numbers beside K, V and states: four for each row, and for
// steps of so many tokens three (by ops four) for each token, up to a power of
// two, which are kept.
int64_t number_bytes(const Kind& kind, int64_t rows,
                     const std::set<int64_t>& tokens) {
  std::set<uint64_t> buffers;
  for (const int64_t count : tokens) {
    buffers.insert(std::bit_ceil(static_cast<uint64_t>(rows * count)));
  }
  int64_t bytes = 4 * 8 * rows;
  for (const uint64_t size : buffers) {
    bytes += static_cast<int64_t>(size) * 8 * (kind.by_ops ? 4 : 3);
  }
  return bytes;
}

// Reserved bytes are those of the storages that are really held.
TEST_P(MemoryTest, TheReportIsWhatIsAllocated) {
  const int64_t before = memory.live_bytes;
  std::unique_ptr<Cache> cache = kind.make(spec_of(model, rows, 16, dtype));
  const auto held = [&] { return memory.live_bytes - before; };
  const auto reported = [&] {
    return static_cast<int64_t>(cache->memory().total().reserved);
  };
  int64_t numbers = number_bytes(kind, rows, {});
  EXPECT_EQ(held(), reported() + numbers);
  if (kind.name == "Preallocated") {
    EXPECT_EQ(reported(), bytes_needed(cache->spec(), 16));
    EXPECT_EQ(reported(), *cache->memory().k.capacity * 2 +
                              cache->memory().conv.reserved +
                              cache->memory().recurrent.reserved);
  }
  feed_checked(*cache, {}, some_ids(5), 2);
  numbers = number_bytes(kind, rows, {1, 2});
  EXPECT_EQ(held(), reported() + numbers);
  cache->mark();
  EXPECT_EQ(held(), reported() + numbers);
  cache->mark();  // there is one already
  EXPECT_EQ(held(), reported() + numbers);
  const size_t points = cache->memory().restore_points.used;
  EXPECT_EQ(points > 0, hybrid);
  // What a step leaves behind does not keep replaced memory alive.
  if (PreallocatedCache* in_place = preallocated(*cache)) {
    in_place->reserve(13);
    EXPECT_EQ(held(), reported() + numbers);
  }
  if (!kind.fixed_rows) {
    cache->repeat_rows(3);
    EXPECT_EQ(held(), reported() + number_bytes(kind, 3 * rows, {}));
    EXPECT_EQ(cache->memory().restore_points.used, points);  // shared
    cache->reorder(std::vector<int64_t>{0});
    EXPECT_EQ(held(), reported() + number_bytes(kind, 1, {}));
    numbers = number_bytes(kind, 1, {2});
  }
  feed(*cache, model, std::vector<Ids>(cache->lengths().size(), Ids{1, 2}));
  cache->truncate(5);
  EXPECT_EQ(held(), reported() + numbers);
  const size_t used = cache->memory().k.used;
  EXPECT_EQ(used, cache->memory().v.used);
  EXPECT_LE(used, cache->memory().k.reserved);
  cache->reset();
  EXPECT_EQ(cache->memory().k.used, 0U);
  EXPECT_EQ(held(), reported() + numbers);
  cache.reset();
  EXPECT_EQ(held(), 0);
}

// A4, promise 9: K and V are compact copies; no view of the caller's larger
// tensor (all of Q, K and V in one) stays alive.
TEST_P(MemoryTest, TheInputsAreNotKeptAlive) {
  const std::unique_ptr<Cache> cache = make();
  const Inputs inputs(model, cache->spec(), 2);
  run_step(*cache, inputs, {.tokens = 2});
  for (const Tensor& t : inputs.kv) {
    if (t.defined()) {
      EXPECT_EQ(t.storage().use_count(), 1U);
    }
  }
}

// Every verb, with the n-th allocation failing, for each n: all as before.
TEST_P(MemoryTest, AFailingAllocationChangesNothing) {
  if (dtype != at::kFloat) {
    return;  // allocations are the same
  }
  Checkpoint saved;
  std::vector<KvTensors> plain;
  const auto prepare = [&] {
    std::unique_ptr<Cache> cache = make();
    feed_all(*cache, model, some_ids(3));
    cache->mark();
    std::vector<Ids> next(rows, Ids{1});
    next[0] = {1, 2};
    feed(*cache, model, next);
    return cache;
  };
  {
    const std::unique_ptr<Cache> other = make();
    feed_all(*other, model, some_ids(9, 2));
    saved = other->checkpoint(0);
    for (size_t i = 0; !hybrid && i < model.layers.size(); ++i) {
      plain.push_back(other->export_kv(static_cast<int64_t>(i)));
    }
  }
  const Inputs inputs(model, make()->spec(), 5);
  using Verb = std::function<void(Cache&)>;
  std::vector<std::pair<std::string, Verb>> verbs = {
      {"step", [&](Cache& c) { run_step(c, inputs, {.tokens = 5}); }},
      {"mark", [](Cache& c) { c.mark(); }},
      {"truncate", [](Cache& c) { c.truncate(3); }},
      {"reset", [](Cache& c) { c.reset(); }},
      {"reorder",
       [&](Cache& c) { c.reorder(std::vector<int64_t>(rows, rows - 1)); }},
      {"fork", [](Cache& c) { c.fork(); }},
      {"checkpoint", [](Cache& c) { c.checkpoint(0); }},
      {"restore", [&](Cache& c) { c.restore(saved, rows - 1); }}};
  if (!hybrid) {
    verbs.emplace_back("export_kv", [](Cache& c) { c.export_kv(0); });
    verbs.emplace_back("import_kv", [&](Cache& c) {
      std::vector<int64_t> lengths = all(6);
      lengths[rows - 1] = 9;
      c.import_kv(plain, lengths);
    });
  }
  if (!kind.fixed_rows) {
    verbs.emplace_back("reorder to five", [](Cache& c) {
      c.reorder(std::vector<int64_t>{0, 0, 0, 0, 0});
    });
    verbs.emplace_back("repeat_rows", [](Cache& c) { c.repeat_rows(2); });
  }
  if (kind.growing) {
    verbs.emplace_back("reserve",
                       [](Cache& c) { preallocated(c)->reserve(16); });
  }
  for (const auto& [name, verb] : verbs) {
    bool failed = true;
    for (int64_t n = 0; failed; ++n) {
      ASSERT_LT(n, 200) << name;
      const std::unique_ptr<Cache> cache = prepare();
      const std::string held = picture(*cache);
      const size_t points = cache->memory().restore_points.used;
      memory.fail_after = n;
      const std::string error = error_of([&] { verb(*cache); });
      memory.fail_after = -1;
      failed = !error.empty();
      if (failed) {
        EXPECT_EQ(error, "[TestAllocator] out of memory, as planned.");
        ASSERT_EQ(picture(*cache), held) << name << " failing at " << n;
        EXPECT_EQ(cache->memory().restore_points.used, points) << name;
      }
      ASSERT_EQ(cache->validate(), std::vector<std::string>{}) << name;
      if (failed) {  // and it goes on
        std::vector<Ids> next(rows, Ids{4});
        const std::vector<Floats> got = feed(*cache, model, next);
        ASSERT_EQ(got[0],
                  last_of(*cache, model, joined(some_ids(3), {1, 2, 4}), 1))
            << name << " failing at " << n;
      }
    }
  }
}

}  // namespace
}  // namespace kvcache::toy
