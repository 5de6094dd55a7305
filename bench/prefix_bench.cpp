// prefix_bench.cpp - what a shared beginning saves, and what keeping it costs.
//
// usage: prefix_bench MODEL|random-hybrid [SHARED [SUFFIX [ROUNDS]]]
//
// One run, everything in turns, medians: a prompt of SHARED + SUFFIX tokens
// cold and behind a kept prefix of SHARED, beside what the warm one cannot do
// without (SUFFIX tokens on an empty cache, and a plain copy of the bytes that
// are restored); the same prompt again; taking and restoring a checkpoint
// beside plain copies of its bytes; a stream that shares nothing, with a store
// and without.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "bench/random_model.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/prefix_cache.h"

namespace {

using namespace kvcache;
using Clock = std::chrono::steady_clock;
using Tokens = std::vector<int64_t>;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : x[x.size() / 2];
}

class Bench {
 public:
  Bench(std::shared_ptr<const model::Transformer> of, int64_t shared,
        int64_t suffix)
      : model_(std::move(of)), shared_(shared), suffix_(suffix) {
    cache_ = make_cache(model::default_cache_kind(*model_), *model_,
                        {.capacity = shared + suffix + 32});
  }

  void round() {
    const Tokens beginning = draw(shared_);
    const Tokens first = joined(beginning, draw(suffix_));
    const Tokens second = joined(beginning, draw(suffix_));
    auto prefix = new_prefix();
    note("cold", first_token(second, nullptr));
    note("suffix on an empty cache", first_token(draw(suffix_), nullptr));
    first_token(beginning, prefix);  // leaves the beginning behind
    note("warm", first_token(second, prefix));
    note("the same again", first_token(second, prefix));
    note("its first token", known_token(second, prefix));
    checkpoints(second);
    const Tokens other = draw(shared_ / 4);
    note("0 % hits, no store", first_token(other, nullptr));
    note("0 % hits, store", first_token(other, new_prefix()));
  }

  void print() const {
    for (const auto& [name, times] : times_) {
      std::printf("%-28s %10.2f ms\n", name.c_str(), median(times));
    }
    const auto of = [&](const char* name) { return median(times_.at(name)); };
    std::printf("checkpoint of %.1f MB\n", static_cast<double>(bytes_) / 1e6);
    std::printf("cold / warm                  %10.1f x\n",
                of("cold") / of("warm"));
    std::printf("warm / (suffix + copy)       %10.2f x\n",
                of("warm") / (of("suffix on an empty cache") + of("copy")));
    std::printf("take / copy                  %10.2f x\n",
                of("take a checkpoint") / of("copy"));
    std::printf("restore / copy               %10.2f x\n",
                of("restore it") / of("copy"));
    std::printf("store / no store, 0 %% hits   %10.3f x\n",
                of("0 % hits, store") / of("0 % hits, no store"));
  }

 private:
  Tokens draw(int64_t count) {
    Tokens tokens(static_cast<size_t>(count));
    for (int64_t& token : tokens) {
      token = static_cast<int64_t>(random_() % 30000);
    }
    return tokens;
  }
  static Tokens joined(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  std::shared_ptr<model::PrefixCache> new_prefix() const {
    return std::make_shared<model::PrefixCache>(
        model_, std::make_shared<CheckpointStore>(StoreOptions{
                    .max_bytes = size_t{4} << 30, .min_prefix = 16}));
  }
  // Until the first token is there; then the text is over and kept.
  double first_token(const Tokens& prompt,
                     std::shared_ptr<model::PrefixCache> prefix) {
    cache_->reset();
    const auto start = Clock::now();
    model::GenerateOptions options{.max_new_tokens = 1, .ignore_eos = true};
    options.prefix = std::move(prefix);
    model::generate(*model_, cache_.get(), prompt, options);
    return ms_since(start);
  }
  // Until the first token of a prompt that was there before is shown.
  double known_token(const Tokens& prompt,
                     std::shared_ptr<model::PrefixCache> prefix) {
    cache_->reset();
    double shown = 0;
    const auto start = Clock::now();
    model::GenerateOptions options{.max_new_tokens = 1, .ignore_eos = true};
    options.prefix = std::move(prefix);
    model::generate(*model_, cache_.get(), prompt, options,
                    {.on_token = [&](const model::GeneratedToken&) {
                      shown = ms_since(start);
                    }});
    return shown;
  }
  void checkpoints(const Tokens& prompt) {
    first_token(prompt, nullptr);
    auto start = Clock::now();
    const Checkpoint taken = cache_->checkpoint(0, BlockOptions{});
    note("take a checkpoint", ms_since(start));
    bytes_ = taken.bytes();
    start = Clock::now();
    cache_->restore(taken, 0);
    note("restore it", ms_since(start));
    // Into memory that is there for the first time, as a checkpoint's is.
    start = Clock::now();
    const at::Tensor copy = source(bytes_).clone();
    note("copy", ms_since(start));
  }
  const at::Tensor& source(size_t bytes) {
    if (!source_.defined() || source_.nbytes() != bytes) {
      source_ = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
      std::memset(source_.data_ptr(), 1, bytes);
    }
    return source_;
  }
  void note(const std::string& name, double ms) { times_[name].push_back(ms); }

  std::shared_ptr<const model::Transformer> model_;
  int64_t shared_, suffix_;
  std::unique_ptr<Cache> cache_;
  std::mt19937 random_{3};
  std::map<std::string, std::vector<double>> times_;
  size_t bytes_ = 0;
  at::Tensor source_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: prefix_bench MODEL|random-hybrid [SHARED [SUFFIX "
                 "[ROUNDS]]]\n");
    return 2;
  }
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const std::string path = argv[1];
  Bench bench(path == "random-hybrid"
                  ? kvcache::bench::random_hybrid(at::kBFloat16)
                  : model::load_model(path),
              number(2, 2048), number(3, 16));
  for (int64_t i = 0; i < number(4, 3); ++i) bench.round();
  bench.print();
}
