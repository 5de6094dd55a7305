// prefix.h - what requests share, as the command line asks for it.
#pragma once

#include "examples/cli/engine.h"
#include "examples/cli/options.h"
#include "kvcache/model/prefix_cache.h"

namespace kvcache::cli {

struct PrefixFlags {
  int64_t mb = 0;  // 0: off
  std::optional<std::string> folder;
  int64_t folder_mb = 1024;

  void check(const ModelOptions& model) const;  // throws UsageError
};

void add_prefix_options(CLI::App& command, PrefixFlags& flags);

// Null if it is off.
std::shared_ptr<model::PrefixCache> prefix_for(const Engine& engine,
                                               const ModelOptions& options,
                                               const PrefixFlags& flags);

// What may be shared: texts of this model and of one name.
Namespace space_of(const Engine& engine, const std::string& name);

// "matched", "restored", "computed", "decoded", "reason", "first_different",
// and "in_row"; null without a prefix cache.
Json reuse_json(const model::GenerateResult& result);
Json report_json(const LookupReport& report);

}  // namespace kvcache::cli
