// core.cpp - a program outside the tree on kvcache::kvcache: one step.

#include <ATen/ops/ones.h>

#include <cstdio>

#include "kvcache/attention.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/version.h"

int main() {
  kvcache::check_libtorch();
  kvcache::PreallocatedCache cache(
      {.rows = 1,
       .capacity = 8,
       .dtype = at::kFloat,
       .layers = {kvcache::AttentionLayer{.heads = 2, .head_dim = 8}}});
  const at::Tensor ones = at::ones({1, 2, 3, 8});
  kvcache::Step step = cache.begin_step({.tokens = 3});
  const at::Tensor seen = kvcache::attend(ones, step.update(0, ones, ones));
  step.commit();
  std::printf("kvcache %s on LibTorch %s: %s\n",
              std::string(kvcache::version()).c_str(),
              kvcache::loaded_libtorch_version().c_str(),
              cache.describe().c_str());
  return seen.sum().item<float>() == 48.0F ? 0 : 1;
}
