// kvcache/reuse_report.h - who may reuse what, and why a request reused no
// more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvcache {

// What separates texts that have the same tokens. Nothing is ever shared
// between two tenants, models or bases. An adapter separates from `active_from`
// on; the tokens before it were computed without it, so they are shared with
// texts that have no adapter or another one. All parts are compared as whole
// strings, in any bytes.
struct Namespace {
  std::string model = {};    // weights, tokenizer, settings that change results
  std::string base = {};     // what else every token rests on; empty: nothing
  std::string adapter = {};  // empty: none
  int64_t active_from = 0;   // first position computed with the adapter
  std::string tenant = {};   // a salt: never logged, never shown
  bool operator==(const Namespace&) const = default;
};

// Why no more of a request was reused.
enum class ReuseReason : uint8_t {
  kAll,            // all that was asked for, or all that any text has of it
  kNoEntry,        // no text begins alike
  kNamespace,      // only texts of another namespace are there
  kRoute,          // more is there, of another route
  kGeneration,     // more is there, of other weights
  kTokensDiverge,  // reused up to where the tokens differ
  kNoCheckpointBefore,  // tokens match further than any place to restore
  kEvicted,             // more was there, and had to go
  kTooShort,            // shorter than what is worth keeping
  kNotEligible,         // the caller says that it may not reuse
  kDtypeOrLayout,       // more is there, for caches of another make
  kDisabled             // the store keeps nothing
};
// "no_entry", "tokens_diverge", ...; kAll: "all".
std::string_view to_string(ReuseReason reason) noexcept;

// All counts in tokens.
struct LookupReport {
  ReuseReason reason = ReuseReason::kAll;
  // Shared with the text of the namespace that shares most, whatever its route.
  int64_t matched = 0;
  int64_t attention = 0;  // K and V could be restored up to here
  // States could be restored up to here; empty: the model has none.
  std::optional<int64_t> recurrent = {};
  int64_t restored = 0;  // what the hit restores
  int64_t computed = 0;  // the rest of the request
  int64_t decoded = 0;   // of `restored`: written by decode, not by prefill
  // Where the text that shares most has another token; empty: it has none.
  std::optional<int64_t> first_different = {};
  // Where the request leaves the known texts, removed ones that are still
  // remembered included: a place worth a checkpoint. Empty: it does not.
  std::optional<int64_t> divergence = {};
  std::optional<std::string> route = {};  // of what is restored
};

}  // namespace kvcache
