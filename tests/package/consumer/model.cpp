// model.cpp - a program outside the tree on kvcache::model: scores a few tokens
// with the model that it is given.

#include <cstdio>
#include <vector>

#include "kvcache/model/score.h"
#include "kvcache/model/transformer.h"
#include "kvcache/preallocated_cache.h"

int main(int, char** argv) {
  const auto model = kvcache::model::load_model(argv[1]);
  kvcache::PreallocatedCache cache(model->cache_spec(1, 8));
  const std::vector<int64_t> tokens{1, 2, 3, 4};
  const auto scores = kvcache::model::score(*model, &cache, tokens);
  for (const float score : scores) std::printf("%f\n", score);
  return scores.size() == 3 ? 0 : 1;
}
