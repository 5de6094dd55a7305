// prefix_impl.h - what PrefixCache and PrefixRun share.
#pragma once

#include "kvcache/model/prefix_cache.h"
#include "src/model/reuse/saved_texts.h"

namespace kvcache::model {

struct PrefixCache::Impl {
  Impl(std::shared_ptr<const LanguageModel> of,
       std::shared_ptr<CheckpointStore> in, PrefixOptions with);

  std::string layout_for(const CacheSpec& spec) const;
  int64_t restore_multiple() const { return any_token ? 1 : options.chunk; }

  std::shared_ptr<const LanguageModel> model;
  std::shared_ptr<CheckpointStore> store;
  PrefixOptions options;
  PlacementPolicy placement;
  bool any_token;
  std::optional<SavedTexts> saved;
};

}  // namespace kvcache::model
