// batch_requests.cpp - the requests of `kvcache batch`: one JSON object a line.

#include "examples/cli/batch_requests.h"

#include <stdexcept>

#include "examples/cli/errors.h"
#include "examples/cli/request_json.h"

namespace kvcache::cli {
namespace {

// Of an adapter; empty: none.
std::string name(const std::string& key, const Json& value) {
  if (!value.is_string()) refuse(key, "the name of an adapter", value);
  return value.get<std::string>();
}

constexpr RequestKey<BatchLine> kKeys[] = {
    {"id", [](const std::string&, const Json&, BatchLine&) {}},  // set before
    {"prompt", [](const std::string& key, const Json& value,
                  BatchLine& line) { line.prompt = full_text(key, value); }},
    {"tokens", [](const std::string& key, const Json& value,
                  BatchLine& line) { line.tokens = ids(key, value); }},
    {"max_new_tokens",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.max_new_tokens = whole(key, value);
     }},
    {"temperature",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.temperature = number(key, value);
     }},
    {"top_k",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.top_k = whole(key, value);
     }},
    {"top_p",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.top_p = number(key, value);
     }},
    {"min_p",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.min_p = number(key, value);
     }},
    {"repetition_penalty",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.repetition_penalty = number(key, value);
     }},
    {"seed",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.seed = unsigned_whole(key, value);
     }},
    {"stop", [](const std::string& key, const Json& value,
                BatchLine& line) { line.text.stop = texts(key, value); }},
    {"ignore_eos",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.ignore_eos = flag(key, value);
     }},
    {"chat", [](const std::string& key, const Json& value,
                BatchLine& line) { line.chat = flag(key, value); }},
    {"namespace",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.name_space = full_text(key, value);
     }},
    {"route", [](const std::string& key, const Json& value,
                 BatchLine& line) { line.route = name(key, value); }},
    {"adapter_from",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.adapter_from = whole(key, value);
     }},
};

BatchLine parse_line(std::string_view text, int64_t number,
                     const TextOptions& defaults) {
  BatchLine line;
  line.id = number;
  line.text = defaults;
  try {
    const Json object = parse_object(text);
    line.id = id_of(object).value_or(line.id);
    set_keys(kKeys, object, line);
    if (line.prompt.has_value() == line.tokens.has_value()) {
      throw std::runtime_error("give exactly one of prompt and tokens");
    }
    if (line.tokens && line.chat.value_or(false)) {
      throw std::runtime_error(
          "tokens are used exactly as they are; leave chat out");
    }
  } catch (const std::exception& error) {
    line.error = message_of(error);
  }
  return line;
}

}  // namespace

std::vector<BatchLine> parse_batch(std::string_view file,
                                   const TextOptions& defaults) {
  return parse_lines<BatchLine>(file,
                                [&](std::string_view text, int64_t number) {
                                  return parse_line(text, number, defaults);
                                });
}

}  // namespace kvcache::cli
