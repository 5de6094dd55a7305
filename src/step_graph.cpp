#include "kvcache/step_graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "cache_impl.h"

namespace kvcache {
namespace {

constexpr size_t kMostFailures = 3;  // that are kept as text
constexpr size_t kMostText = 160;    // characters of one

double seconds_since(std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  return took.count();
}

}  // namespace

struct StepGraph::Impl {
  // What a recording is for. Its window is part of the shapes, the rest of the
  // host's numbers is not in it.
  struct Key {
    int64_t tokens = 1, first_row = 0, rows = 0, window = 0, repeats = 1;
    bool may_finish = false;  // whether the flags are read
    auto operator<=>(const Key&) const = default;
  };
  struct Recording {
    std::unique_ptr<RecordedWork> work;
    std::vector<const void*> addresses;
  };

  Impl(Cache& of, Work work, const StepGraphOptions& with)
      : cache(of), fn(std::move(work)), options(with) {}

  StepData& step() { return cache.impl_->step; }
  void begin(const Key& key, const StepSpec& spec);
  void once(int64_t repeat);
  void device_work(int64_t repeats);
  // The same, all or nothing: for work that runs at once and may throw.
  void guarded(const Key& key, const std::function<void()>& work);
  std::unique_ptr<RecordedWork> recorded(const Key& key);
  void check_rows() const;
  std::vector<const void*> addresses();
  void check_addresses(const Key& key, const Recording& recording);
  Recording* find(const Key& key);
  Recording* record(const Key& key);
  void keep(const Key& key, Recording recording);
  void retire();
  void note_failure(const Key& key, const std::string& why);
  size_t bytes() const;

  Cache& cache;
  Work fn;
  StepGraphOptions options;
  std::map<Key, Recording> recordings;
  std::map<Key, std::string> failed;
  uint64_t epoch = 0;    // that the recordings were made in
  bool pending = false;  // the last run was not read back
  GraphStatistics statistics;
};

// The host half. The step is open from here to the end of the run.
void StepGraph::Impl::begin(const Key& key, const StepSpec& spec) {
  cache.begin_host(spec, key.repeats, key.window);
  step().recorded = true;
}

// One step between its device halves.
void StepGraph::Impl::once(int64_t repeat) {
  cache.begin_device();
  step().open = true;
  Step open(cache);  // closes it, whatever happens
  fn(open, repeat);
  open.check_complete();
  cache.commit_device();
}

void StepGraph::Impl::device_work(int64_t repeats) {
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    once(repeat);
  }
}

void StepGraph::Impl::guarded(const Key& key,
                              const std::function<void()>& work) {
  Cache::Impl& inner = *cache.impl_;
  std::optional<RowStates> before;
  if (key.repeats > 1 && !inner.states.empty()) {
    before = inner.states.copy();  // a later repeat may throw
  }
  inner.numbers.finished = key.may_finish ? options.finished : Tensor();
  try {
    work();
    inner.numbers.finished = Tensor();
  } catch (...) {
    inner.numbers.finished = Tensor();
    inner.numbers.forget();
    if (before) {
      inner.states.copy_from(*before);
    }
    throw;
  }
}

std::vector<const void*> StepGraph::Impl::addresses() {
  std::vector<const void*> found;
  const auto add = [&](const Tensor& t) {
    found.push_back(t.defined() ? t.const_data_ptr() : nullptr);
  };
  for (const KvView& view : step().views) {
    for (const Tensor* t : {&view.k, &view.v, &view.limits, &view.cells}) {
      add(*t);
    }
  }
  add(step().positions);
  add(step().taken);
  cache.impl_->states.add_addresses(found);
  for (const Tensor& input : options.inputs) {
    add(input);
  }
  add(options.finished);
  return found;
}

// A graph reads the addresses that it was recorded with, and an eager twin
// whatever the code finds: so that both fail alike, they are compared.
void StepGraph::Impl::check_addresses(const Key& key,
                                      const Recording& recording) {
  const std::vector<const void*> now = addresses();
  for (size_t i = 0; i < now.size(); ++i) {
    TORCH_CHECK(now[i] == recording.addresses[i],
                "[StepGraph::run] every tensor must be where it was when "
                "window ",
                key.window, " was recorded but tensor ", i, " of ", now.size(),
                " has moved; keep inputs in place with copy_(), or clear() "
                "the graphs.");
  }
}

StepGraph::Impl::Recording* StepGraph::Impl::find(const Key& key) {
  if (epoch != cache.address_epoch()) {
    retire();
    failed.clear();
    epoch = cache.address_epoch();
  }
  const auto found = recordings.find(key);
  return found == recordings.end() ? nullptr : &found->second;
}

std::unique_ptr<RecordedWork> StepGraph::Impl::recorded(const Key& key) {
  std::unique_ptr<RecordedWork> work;
  guarded(key, [&] {
    work = options.backend->record(
        [this, repeats = key.repeats] { device_work(repeats); });
  });
  return work;
}

void StepGraph::Impl::check_rows() const {
  const Tensor& finished = options.finished;
  TORCH_CHECK(!finished.defined() || finished.size(0) == cache.spec().rows,
              "[StepGraph::run] finished must have one flag for each of ",
              cache.spec().rows, " rows but has ",
              finished.defined() ? finished.size(0) : 0,
              "; make another StepGraph for another row count.");
}

// No row takes a token in it: dead tokens go to the spare cells, and neither
// lengths nor states change, so there is nothing to put back.
StepGraph::Impl::Recording* StepGraph::Impl::record(const Key& key) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int64_t> none(static_cast<size_t>(key.rows), 0);
  begin(key, {.tokens = key.tokens,
              .count = none,
              .first_row = key.first_row,
              .rows = key.rows});
  Recording recording;
  recording.addresses = addresses();
  recording.work = recorded(key);
  options.backend->synchronize();
  keep(key, std::move(recording));
  ++statistics.captures;
  statistics.capture_seconds += seconds_since(start);
  return &recordings.at(key);
}

void StepGraph::Impl::keep(const Key& key, Recording recording) {
  size_t size = recording.work->bytes();
  const size_t budget = options.byte_budget.value_or(~size_t{0});
  if (size > budget) {
    recording.work.reset();
    if (recordings.empty()) {
      options.backend->retired();
    }
    TORCH_CHECK(false, "[StepGraph] the graph of window ", key.window,
                " needs ", size, " bytes but the budget is ", budget,
                "; raise StepGraphOptions::byte_budget.");
  }
  if (bytes() + size > budget) {
    // Its memory may be shared with those that go, so it is made anew.
    recording.work.reset();
    retire();
    recording.work = recorded(key);
    size = recording.work->bytes();
  }
  recordings.emplace(key, std::move(recording));
  statistics.graphs.push_back({key.window, key.repeats, size});
  cache.impl_->graph_bytes += size;
}

size_t StepGraph::Impl::bytes() const {
  size_t sum = 0;
  for (const GraphStatistics::Graph& graph : statistics.graphs) {
    sum += graph.bytes;
  }
  return sum;
}

void StepGraph::Impl::retire() {
  if (recordings.empty()) {
    return;
  }
  cache.impl_->graph_bytes -= bytes();
  recordings.clear();
  statistics.graphs.clear();
  ++statistics.generations;
  options.backend->retired();
}

void StepGraph::Impl::note_failure(const Key& key, const std::string& why) {
  const std::string text =
      c10::str("window ", key.window, ": ", why.substr(0, why.find('\n')))
          .substr(0, kMostText);
  failed.emplace(key, text);
  if (statistics.failures.size() < kMostFailures) {
    statistics.failures.push_back(text);
  }
}

StepGraph::StepGraph(Cache& cache, Work work, const StepGraphOptions& options)
    : impl_(std::make_unique<Impl>(cache, std::move(work), options)) {
  const char* refusal = cache.do_cannot_record();
  TORCH_CHECK_NOT_IMPLEMENTED(
      refusal == nullptr, "[StepGraph::StepGraph] steps of ", cache.describe(),
      " cannot be recorded: ", refusal == nullptr ? "" : refusal, ".");
  TORCH_CHECK_VALUE(impl_->fn,
                    "[StepGraph::StepGraph] the work of a step "
                    "must be given but is empty.");
  if (!impl_->options.backend) {
    impl_->options.backend = eager_graphs();
  }
  const Tensor& finished = options.finished;
  TORCH_CHECK_VALUE(
      !finished.defined() ||
          (finished.dim() == 1 && finished.size(0) == cache.spec().rows &&
           finished.scalar_type() == at::kBool &&
           finished.device() == cache.spec().device),
      "[StepGraph::StepGraph] finished must be [", cache.spec().rows,
      "] bool on ", cache.spec().device, ", one flag per row.");
  impl_->epoch = cache.address_epoch();
}

StepGraph::~StepGraph() {
  try {
    read_back();   // or the cache would wait for it for ever
  } catch (...) {  // the device is lost, and the cache's contents with it
  }
  impl_->retire();
}

void StepGraph::run(const StepSpec& spec, int64_t repeats, bool may_finish) {
  TORCH_CHECK_VALUE(repeats >= 1,
                    "[StepGraph::run] repeats must be >= 1 but got ", repeats,
                    "; a replay makes at least one step.");
  TORCH_CHECK_VALUE(!may_finish || impl_->options.finished.defined(),
                    "[StepGraph::run] rows can end only if "
                    "StepGraphOptions::finished is given.");
  Impl& impl = *impl_;
  impl.check_rows();
  Impl::Key key{
      .tokens = spec.tokens, .repeats = repeats, .may_finish = may_finish};
  StepSpec plain = spec;
  plain.state_window = false;  // a graph keeps no states between its tokens
  impl.cache.begin_host(plain, repeats, {});  // checks the whole spec
  key.first_row = impl.step().first_row;
  key.rows = impl.step().rows;
  key.window = impl.step().window;
  Impl::Recording* recording = impl.find(key);
  if (recording == nullptr && !impl.failed.contains(key)) {
    try {
      recording = impl.record(key);
    } catch (const std::exception& error) {
      impl.note_failure(key, error.what());
    }
  }
  impl.begin(key, plain);
  if (recording != nullptr) {
    impl.check_addresses(key, *recording);
    impl.guarded(key, [&] { recording->work->replay(); });
    ++impl.statistics.replays;
  } else {
    impl.guarded(key, [&] { impl.device_work(repeats); });
    ++impl.statistics.eager_runs;
  }
  if (may_finish) {
    impl.cache.impl_->windows.committed(impl.step());  // its rows have none
    impl.cache.impl_->pending = impl.pending = true;
  } else {
    impl.cache.commit_host(repeats);
  }
}

std::span<const int64_t> StepGraph::read_back() {
  Cache::Impl& inner = *impl_->cache.impl_;
  if (inner.pending && impl_->pending) {
    impl_->pending = false;
    inner.lengths = inner.numbers.read_lengths();
    inner.pending = false;
  }
  return impl_->cache.lengths();
}

double StepGraph::capture(int64_t window, int64_t tokens, int64_t repeats) {
  TORCH_CHECK_VALUE(tokens >= 1 && repeats >= 1,
                    "[StepGraph::capture] tokens and repeats must be >= 1 but "
                    "got ",
                    tokens, " and ", repeats, ".");
  Impl& impl = *impl_;
  const Impl::Key key{.tokens = tokens,
                      .rows = impl.cache.spec().rows,
                      .window = window,
                      .repeats = repeats,
                      .may_finish = impl.options.finished.defined()};
  const double before = impl.statistics.capture_seconds;
  impl.cache.check_idle("capture");
  impl.check_rows();
  if (impl.find(key) == nullptr) {
    try {
      impl.record(key);
    } catch (const std::exception& error) {
      impl.note_failure(key, error.what());
      throw;
    }
  }
  return impl.statistics.capture_seconds - before;
}

void StepGraph::clear() {
  impl_->cache.check_idle("clear");
  impl_->retire();
  impl_->failed.clear();
}

const GraphStatistics& StepGraph::statistics() const noexcept {
  return impl_->statistics;
}

}  // namespace kvcache
