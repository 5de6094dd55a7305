// choice_checks.h - what makes options and requests of multiple choice valid.
#pragma once

#include "kvcache/model/choice_runner.h"

namespace kvcache::model {

ChoiceOptions checked(ChoiceOptions options, const RoutedModel& model);
void check_request(const ChoiceRequest& request, const ChoiceOptions& options,
                   const RoutedModel& model);
// Throws c10::IndexError unless it is 0 or loaded.
void check_route(int64_t route, const RoutedModel& model);
bool is_loaded(int64_t route, const RoutedModel& model);

}  // namespace kvcache::model
