// choice_impl.h - what a ChoiceRunner is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "choice_memo.h"
#include "chunk_graphs.h"
#include "kvcache/checkpoint_policy.h"

namespace kvcache::model {

struct ChoiceRunner::Impl {
  Impl(std::shared_ptr<const RoutedModel> of,
       std::shared_ptr<CheckpointStore> in, ChoiceOptions with);

  ChoiceRefusal eligible(const ChoiceRequest& request) const;
  ChoiceResult answer(const ChoiceRequest& request);
  // Without store and graphs: the whole request at once.
  ChoiceResult plain(const ChoiceRequest& request, ChoiceRefusal why);
  std::vector<std::vector<float>> probabilities(
      const Tensor& hidden, const ChoiceRequest& request) const;
  // Zeros to begin with; undefined: there is no router.
  Tensor no_features() const;

  std::shared_ptr<const RoutedModel> model;
  std::shared_ptr<CheckpointStore> store;
  ChoiceOptions options;
  PlacementPolicy placement;
  std::string layout;
  Tensor letters;  // [N]
  ChunkGraphs graphs;
  ChoiceMemo memo;
  int64_t last_route = 0;
  int64_t plain_count = 0, memo_hits = 0;
};

}  // namespace kvcache::model
