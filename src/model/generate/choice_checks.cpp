// choice_checks.cpp - checks before anything runs, and words for reasons.
#include "choice_checks.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

namespace kvcache::model {
namespace {

bool ascend(const std::vector<int64_t>& values) {
  return !values.empty() && values.front() >= 1 &&
         std::adjacent_find(values.begin(), values.end(),
                            std::greater_equal<>()) == values.end();
}

// Of ids and letters.
void check_tokens(const char* what, const std::vector<int64_t>& ids,
                  int64_t vocabulary) {
  TORCH_CHECK_VALUE(!ids.empty(), "[ChoiceRunner] ", what,
                    " must be given but are empty.");
  for (const int64_t id : ids) {
    TORCH_CHECK_INDEX(id >= 0 && id < vocabulary, "[ChoiceRunner] ", what,
                      " must be in [0, ", vocabulary, ") but one is ", id,
                      "; use the model's own tokenizer.");
  }
}

}  // namespace

ChoiceOptions checked(ChoiceOptions options, const RoutedModel& model) {
  check_tokens("letters", options.letters, model.vocab_size());
  TORCH_CHECK_VALUE(ascend(options.lengths) && ascend(options.spans),
                    "[ChoiceRunner] lengths and spans must be counts from 1 on "
                    "that ascend.");
  TORCH_CHECK_VALUE(options.lengths.front() <= options.spans.back(),
                    "[ChoiceRunner] a chunk of ", options.lengths.front(),
                    " tokens must fit into the largest span but that is ",
                    options.spans.back(),
                    "; add a shorter length or a larger span.");
  TORCH_CHECK_VALUE(
      options.max_slots >= 1 && options.min_prefix >= 1 && options.block >= 1,
      "[ChoiceRunner] max_slots, min_prefix and block must be at "
      "least 1 but got ",
      options.max_slots, ", ", options.min_prefix, " and ", options.block, ".");
  return options;
}

bool is_loaded(int64_t route, const RoutedModel& model) {
  const auto loaded = model.routes();
  return route == 0 ||
         std::find(loaded.begin(), loaded.end(), route) != loaded.end();
}

void check_route(int64_t route, const RoutedModel& model) {
  const std::span<const int64_t> loaded = model.routes();
  TORCH_CHECK_INDEX(is_loaded(route, model), "[ChoiceRunner::answer] route ",
                    route, " must be loaded but the model has ",
                    c10::IntArrayRef(loaded.data(), loaded.size()),
                    "; load its adapter.");
}

void check_request(const ChoiceRequest& request, const ChoiceOptions& options,
                   const RoutedModel& model) {
  check_tokens("ids", request.ids, model.vocab_size());
  const auto n = static_cast<int64_t>(request.ids.size());
  TORCH_CHECK_VALUE(n <= model.context_length(),
                    "[ChoiceRunner::answer] ids must be at most ",
                    model.context_length(), ", the model's context, but got ",
                    n, "; crop the state.");
  TORCH_CHECK_VALUE(request.state_len >= 0 && request.state_len <= n,
                    "[ChoiceRunner::answer] state_len must be in [0, ", n,
                    "] but got ", request.state_len, ".");
  TORCH_CHECK_VALUE(request.slots.size() == request.option_counts.size(),
                    "[ChoiceRunner::answer] each of ", request.slots.size(),
                    " slots must have a count of options but there are ",
                    request.option_counts.size(), ".");
  for (const int64_t slot : request.slots) {
    TORCH_CHECK_INDEX(slot >= 0 && slot < n,
                      "[ChoiceRunner::answer] slots must be in [0, ", n,
                      ") but one is ", slot, "; count all tokens.");
  }
  const auto letters = static_cast<int64_t>(options.letters.size());
  for (const int64_t count : request.option_counts) {
    TORCH_CHECK_VALUE(count >= 1 && count <= letters,
                      "[ChoiceRunner::answer] options must be 1 to ", letters,
                      ", the letters, but got ", count,
                      "; add letters to ChoiceOptions.");
  }
  if (request.route) check_route(*request.route, model);
}

std::string_view to_string(ChoiceRefusal refusal) noexcept {
  switch (refusal) {
    case ChoiceRefusal::kNone:
      return "";
    case ChoiceRefusal::kDisabled:
      return "the store keeps nothing";
    case ChoiceRefusal::kRouterAbove:
      return "the router reads a layer above the split";
    case ChoiceRefusal::kRouterFeatures:
      return "the router reads other features than normalised hidden states";
    case ChoiceRefusal::kImages:
      return "the request has images";
    case ChoiceRefusal::kNoStateLength:
      return "the request does not say where its state ends";
    case ChoiceRefusal::kTooShort:
      return "the state is shorter than what is worth keeping";
    case ChoiceRefusal::kSlotCount:
      return "the request has no answer slot or too many";
    case ChoiceRefusal::kSlotInState:
      return "an answer slot lies in the state";
    case ChoiceRefusal::kSuffixTooLong:
      return "the suffix is longer than the longest chunk";
    case ChoiceRefusal::kTooLong:
      return "the request is longer than the largest span";
    case ChoiceRefusal::kColdNotWanted:
      return "nothing to reuse, and a cold request is not wanted now";
    case ChoiceRefusal::kCaptureFailed:
      return "a chunk graph could not be recorded";
  }
  return "";
}

std::string_view to_string(ReuseClass reuse) noexcept {
  switch (reuse) {
    case ReuseClass::kNone:
      return "none";
    case ReuseClass::kHit:
      return "hit";
    case ReuseClass::kPartial:
      return "partial";
    case ReuseClass::kCold:
      return "cold";
  }
  return "";
}

}  // namespace kvcache::model
