// prefix.cpp - what requests share, as the command line asks for it.

#include "examples/cli/prefix.h"

#include "examples/cli/errors.h"
#include "kvcache/model/identity.h"

namespace kvcache::cli {
namespace {

// A person's prompts are short: a system prompt is worth keeping.
constexpr int64_t kMinPrefix = 16;
constexpr int64_t kMostMb = int64_t{1} << 30;

void check_mb(const char* option, int64_t mb) {
  if (mb >= 0 && mb <= kMostMb) return;
  throw UsageError(std::string(option) + " must be between 0 and " +
                   std::to_string(kMostMb) + " but got " + std::to_string(mb));
}

}  // namespace

void PrefixFlags::check(const ModelOptions& model) const {
  check_mb("--prefix-cache-mb", mb);
  check_mb("--prefix-dir-mb", folder_mb);
  if (folder && folder->empty()) {
    throw UsageError("--prefix-dir must be a folder but got an empty name");
  }
  if (folder && mb == 0) {
    throw UsageError("--prefix-dir " + *folder +
                     ": nothing is kept without memory for it; add "
                     "--prefix-cache-mb");
  }
  if (mb > 0 && model.cache == "none") {
    throw UsageError(
        "--prefix-cache-mb " + std::to_string(mb) +
        ": --cache none remembers nothing; choose another --cache");
  }
}

void add_prefix_options(CLI::App& command, PrefixFlags& flags) {
  command
      .add_option("--prefix-cache-mb", flags.mb,
                  "memory for prompts and answers that later requests begin "
                  "with; 0: none")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("MB");
  command
      .add_option("--prefix-dir", flags.folder,
                  "keep them here for later runs of this model, too")
      ->type_name("DIR");
  command
      .add_option("--prefix-dir-mb", flags.folder_mb,
                  "at most; the least recently used go first")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("MB");
}

std::shared_ptr<model::PrefixCache> prefix_for(const Engine& engine,
                                               const ModelOptions& options,
                                               const PrefixFlags& flags) {
  if (flags.mb == 0) return nullptr;
  auto store = std::make_shared<CheckpointStore>(
      StoreOptions{.max_bytes = static_cast<size_t>(flags.mb) << 20,
                   .min_prefix = kMinPrefix});
  model::PrefixOptions prefix{.chunk = options.chunk};
  if (flags.folder) {
    prefix.folder.path = *flags.folder;
    prefix.folder.max_bytes = static_cast<size_t>(flags.folder_mb) << 20;
    prefix.folder.identity =
        model::identity_of(options.model, *engine.model, options.kv_storage());
    // Bits hang on where prefill is cut, where the model is not row-exact.
    prefix.folder.identity["chunk"] = std::to_string(options.chunk);
    prefix.folder.log = [](model::LogLevel, std::string_view line) {
      write_error_line("kvcache: warning: " + message_of(std::string(line)));
    };
  }
  return std::make_shared<model::PrefixCache>(engine.model, std::move(store),
                                              std::move(prefix));
}

Namespace space_of(const Engine& engine, const std::string& name) {
  return {.model = engine.model->config().architecture, .tenant = name};
}

Json reuse_json(const model::GenerateResult& result) {
  if (!result.reuse) return nullptr;
  Json json = report_json(result.reuse->report);
  json["in_row"] = result.reuse->in_row;
  return json;
}

Json report_json(const LookupReport& report) {
  Json json;
  json["matched"] = report.matched;
  json["restored"] = report.restored;
  json["computed"] = report.computed;
  json["decoded"] = report.decoded;
  json["reason"] = report.reason == ReuseReason::kAll
                       ? Json(nullptr)
                       : Json(to_string(report.reason));
  json["first_different"] =
      report.first_different ? Json(*report.first_different) : Json(nullptr);
  return json;
}

}  // namespace kvcache::cli
