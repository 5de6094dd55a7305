// choice_row.cpp - look up, guess the route, run, settle, keep.
#include "choice_row.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <exception>

#include "choice_checks.h"

namespace kvcache::model {
namespace {

// As the store knows it: 0 is no adapter.
std::string route_name(int64_t route) {
  return route == 0 ? std::string() : std::to_string(route);
}
int64_t route_of(const std::string& name) {
  int64_t route = name.empty() ? 0 : -1;
  std::from_chars(name.data(), name.data() + name.size(), route);
  return route;
}

GraphPart upper_part(int64_t route) {
  return route == 0 ? GraphPart::kUpper : GraphPart::kUpperAdapter;
}

size_t kv_bytes(const CacheSpec& spec, int64_t tokens) {
  return bytes_needed(spec, tokens) - bytes_needed(spec, 0);
}
size_t state_bytes(const CacheSpec& spec) {
  return bytes_needed(spec, 0) / 2;  // it counts the successor too
}

// The place of an adapter among those that are loaded.
int64_t slot_of(int64_t route, const RoutedModel& model) {
  const auto loaded = model.routes();
  return std::find(loaded.begin(), loaded.end(), route) - loaded.begin();
}

constexpr ModelPart kParts[] = {ModelPart::kLower, ModelPart::kUpper};

}  // namespace

ChoiceRow::ChoiceRow(ChoiceRunner::Impl& runner, const ChoiceRequest& request)
    : runner_(runner),
      request_(request),
      n_(static_cast<int64_t>(request.ids.size())),
      state_(runner.placement.align_down(request.state_len)),
      last_tick_(std::chrono::steady_clock::now()) {}

ChoiceRow::~ChoiceRow() {
  try {
    for (const ModelPart part : kParts) runner_.graphs.cache(part).reset();
  } catch (...) {  // a restore resets as well
  }
}

// The deepest checkpoint of a route, or of any.
ChoiceRow::Start ChoiceRow::look_up(std::optional<int64_t> route) {
  LookupRequest wanted{
      .tokens = std::span(request_.ids).first(static_cast<size_t>(state_)),
      .space = request_.space,
      .generation = runner_.options.generation,
      .layout = runner_.layout,
      .limit = state_,
      .deferred = true};
  if (route) wanted.route = route_name(*route);
  Start start{.hit = runner_.store->lookup(wanted), .route = 0, .ends = {}};
  Hit& hit = start.hit;
  if (hit.text && runner_.model->router() && !hit.features.defined()) {
    hit.text.reset();  // of a model without a router
    hit.position = hit.report.restored = 0;
  }
  hit.report.computed = n_ - hit.position;
  start.route = hit.text ? route_of(hit.report.route.value_or(""))
                         : route.value_or(runner_.last_route);
  if (hit.position < state_) {
    start.ends = runner_.placement.positions(hit.position, request_.state_len);
  }
  return start;
}

bool ChoiceRow::take_guess() {
  // Nobody chooses a route where there is no router.
  const bool guessing = request_.route || runner_.model->router();
  guess_ = look_up(guessing ? request_.route : 0);
  if (!is_loaded(guess_.route, *runner_.model)) guess_ = look_up(0);
  const ReuseReason reason = guess_.hit.report.reason;
  if (reason == ReuseReason::kDisabled || reason == ReuseReason::kTooShort) {
    result_.refusal = reason == ReuseReason::kDisabled
                          ? ChoiceRefusal::kDisabled
                          : ChoiceRefusal::kTooShort;
  } else if (!guess_.hit.text && runner_.options.cold_ok &&
             !runner_.options.cold_ok()) {
    result_.refusal = ChoiceRefusal::kColdNotWanted;
  }
  return result_.refusal == ChoiceRefusal::kNone;
}

std::vector<Chunk> ChoiceRow::chunks(const Start& start) const {
  std::vector<Chunk> chunks;
  int64_t from = start.hit.position;
  for (const int64_t end : start.ends) {
    chunks.emplace_back(from, end);
    from = end;
  }
  chunks.emplace_back(state_, n_);
  return chunks;
}

// All graphs of a pass are there before anything is restored.
bool ChoiceRow::ready(const Start& start) {
  const std::vector<Chunk> all = chunks(start);
  const bool fit = std::all_of(all.begin(), all.end(), [&](const Chunk& chunk) {
    return runner_.graphs.shape(chunk).has_value();
  });
  if (!fit) {
    result_.refusal = ChoiceRefusal::kTooLong;
  } else if (!runner_.graphs.ensure(
                 all, {GraphPart::kLower, upper_part(start.route)})) {
    result_.refusal = ChoiceRefusal::kCaptureFailed;
  }
  return result_.refusal == ChoiceRefusal::kNone;
}

void ChoiceRow::restore(const Start& start) {
  ChunkGraphs& graphs = runner_.graphs;
  for (size_t i = 0; i < std::size(kParts); ++i) {
    Cache& cache = graphs.cache(kParts[i]);
    cache.reset();
    if (start.hit.text) {
      cache.restore(start.hit.text->parts[i], 0, start.hit.position);
    }
  }
  if (start.route != 0) {
    graphs.set_slot(slot_of(start.route, *runner_.model));
  }
  extras_.clear();
  if (!graphs.features().defined()) return;
  if (start.hit.text) {
    graphs.features().copy_(start.hit.features);
  } else {
    graphs.features().zero_();
  }
}

void ChoiceRow::after_lower(const Chunk& chunk) {
  const int64_t end = chunk.second;
  if (end > state_) return;
  runner_.graphs.cache(ModelPart::kLower).mark(0);
  const Tensor& features = runner_.graphs.features();
  extras_.push_back(
      {.position = end,
       .features = features.defined() ? features.clone() : Tensor(),
       .final_hidden = {}});
}

Tensor ChoiceRow::upper(int64_t route, const Chunk& chunk) {
  const bool suffix = chunk.second > state_;
  const Tensor& hidden = runner_.graphs.run_upper(
      upper_part(route), chunk,
      suffix ? request_.slots : std::vector<int64_t>());
  if (!suffix) runner_.graphs.cache(ModelPart::kUpper).mark(0);
  return hidden;
}

// Every layer of a chunk, then the next chunk.
Tensor ChoiceRow::one_pass(const Start& start) {
  Tensor hidden;
  for (const Chunk& chunk : chunks(start)) {
    if (chunk.second > state_) tick(result_.timings.prefix);
    runner_.graphs.run_lower(request_.ids, chunk);
    after_lower(chunk);
    hidden = upper(start.route, chunk);
  }
  tick(result_.timings.suffix);
  return hidden;
}

// The lower layers over all chunks, then the upper ones: their hidden states
// are kept in between.
Tensor ChoiceRow::two_passes(const Start& start) {
  const std::vector<Chunk> all = chunks(start);
  for (const Chunk& chunk : all) {
    runner_.graphs.run_lower(request_.ids, chunk);
    after_lower(chunk);
  }
  Tensor hidden;
  for (const Chunk& chunk : all) {
    if (chunk.second > state_) tick(result_.timings.prefix);
    hidden = upper(start.route, chunk);
  }
  tick(result_.timings.suffix);
  return hidden;
}

ChoiceResult ChoiceRow::run() {
  if (!take_guess() || !ready(guess_)) return std::move(result_);
  tick(result_.timings.lookup);
  restore(guess_);
  Tensor hidden = one_pass(guess_);
  int64_t route = guess_.route;
  if (runner_.model->router() && !request_.route) {
    route = runner_.model->route(
        runner_.graphs.features().div(static_cast<double>(n_)));
    check_route(route, *runner_.model);
  }
  if (route == guess_.route) {
    finish(guess_, nullptr, hidden);
    return std::move(result_);
  }
  result_.guessed_wrong = true;
  guess_.hit.text.reset();
  const Start again = look_up(route);
  if (!ready(again)) return std::move(result_);
  restore(again);
  hidden = two_passes(again);
  finish(guess_, &again, hidden);
  return std::move(result_);
}

void ChoiceRow::finish(const Start& guess, const Start* answered,
                       const Tensor& hidden) {
  const Start& from = answered == nullptr ? guess : *answered;
  const int64_t first = guess.hit.position;
  result_.probabilities = runner_.probabilities(hidden, request_);
  result_.route = runner_.last_route = from.route;
  result_.report = from.hit.report;
  result_.reuse = first == state_ ? ReuseClass::kHit
                  : first > 0     ? ReuseClass::kPartial
                                  : ReuseClass::kCold;
  if (answered == nullptr) {
    runner_.store->settle(guess.hit);
  } else {
    runner_.store->settle(guess.hit, answered->hit);
  }
  keep(from);
  tick(result_.timings.save);
}

StoredText ChoiceRow::stored(const Start& from) {
  const PlacementOptions& placement = runner_.placement.options();
  StoredText text{.parts = {},
                  .extras = {},
                  .decoded = {},
                  .restore_multiple = std::max<int64_t>(placement.align, 1)};
  for (size_t i = 0; i < std::size(kParts); ++i) {
    text.parts.push_back(runner_.graphs.cache(kParts[i]).checkpoint(
        0, {.shared = from.hit.text ? &from.hit.text->parts[i] : nullptr,
            .same = from.hit.position,
            .block = runner_.options.block,
            .length = state_}));
  }
  if (runner_.graphs.features().defined()) text.extras = extras_;
  return text;
}

size_t ChoiceRow::most_bytes(const Start& from) const {
  const int64_t copied = state_ - from.hit.position + runner_.options.block;
  size_t bytes = 0;
  for (const ModelPart part : kParts) {
    const CacheSpec& spec = runner_.graphs.cache(part).spec();
    bytes += kv_bytes(spec, copied) + from.ends.size() * state_bytes(spec);
  }
  for (const PointExtras& extras : extras_) {
    if (extras.features.defined()) bytes += extras.features.nbytes();
  }
  return bytes;
}

void ChoiceRow::keep(const Start& from) noexcept {
  if (from.ends.empty()) return;
  try {
    runner_.store->put(
        {.tokens = std::span(request_.ids).first(static_cast<size_t>(state_)),
         .space = request_.space,
         .route = route_name(from.route),
         .generation = runner_.options.generation,
         .layout = runner_.layout,
         .bytes = most_bytes(from),
         .positions = from.ends},
        [&] { return stored(from); });
  } catch (const std::exception&) {
    // The answer is there; a later request computes what could not be kept.
  }
}

void ChoiceRow::tick(double& phase) {
  if (runner_.options.synchronize) runner_.graphs.synchronize();
  const auto now = std::chrono::steady_clock::now();
  phase += std::chrono::duration<double, std::milli>(now - last_tick_).count();
  last_tick_ = now;
}

}  // namespace kvcache::model
