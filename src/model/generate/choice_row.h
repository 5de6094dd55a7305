// choice_row.h - one request on its way through the chunk graphs.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "choice_impl.h"

namespace kvcache::model {

// Leaves the caches empty, whatever happens.
class ChoiceRow {
 public:
  ChoiceRow(ChoiceRunner::Impl& runner, const ChoiceRequest& request);
  ~ChoiceRow();
  ChoiceRow(const ChoiceRow&) = delete;
  ChoiceRow& operator=(const ChoiceRow&) = delete;

  // Its refusal, if any, says that nothing was done, counted or restored.
  ChoiceResult run();

 private:
  // What a pass starts from.
  struct Start {
    Hit hit;
    int64_t route = 0;
    std::vector<int64_t> ends;  // of the chunks of the state
  };
  Start look_up(std::optional<int64_t> route);
  bool take_guess();  // false: the guess cannot be run, see result_.refusal
  bool ready(const Start& start);
  void restore(const Start& start);
  std::vector<Chunk> chunks(const Start& start) const;
  void after_lower(const Chunk& chunk);
  Tensor upper(int64_t route, const Chunk& chunk);
  Tensor one_pass(const Start& start);
  Tensor two_passes(const Start& start);
  void finish(const Start& guess, const Start* answered, const Tensor& hidden);
  void keep(const Start& from) noexcept;
  StoredText stored(const Start& from);
  size_t most_bytes(const Start& from) const;
  void tick(double& phase);

  ChoiceRunner::Impl& runner_;
  const ChoiceRequest& request_;
  int64_t n_, state_;  // tokens; of the state, aligned
  Start guess_;
  std::vector<PointExtras> extras_;
  ChoiceResult result_;
  std::chrono::steady_clock::time_point last_tick_;
};

}  // namespace kvcache::model
