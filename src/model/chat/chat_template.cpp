// chat_template.cpp - a conversation as the text a model expects.

#include "kvcache/model/chat_template.h"

#include <c10/util/Exception.h>
#include <jinja/lexer.h>
#include <jinja/limits.h>
#include <jinja/parser.h>
#include <jinja/runtime.h>

#include <algorithm>
#include <utility>

#include "chat_values.h"

namespace kvcache::model {
namespace {

// What an engine's exception says, on one line of bounded length.
std::string problem_of(const std::exception& error) {
  constexpr size_t kMostBytes = 400;
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.size() > kMostBytes) text = text.substr(0, kMostBytes) + "...";
  return replace_invalid_utf8(text);
}

jinja::limits engine_limits(const ChatLimits& limits) {
  return {.steps = limits.steps,
          .depth = limits.depth,
          .bytes = limits.memory_bytes,
          .time = limits.time};
}

}  // namespace

struct ChatTemplate::Program {
  std::string source;
  std::string bos, eos;
  ChatLimits limits;
  jinja::program program = {};

  void compile();
  void set_variables(std::span<const ChatMessage> messages,
                     const RenderOptions& options,
                     jinja::context& context) const;
  std::vector<TextPart> run(std::span<const ChatMessage> messages,
                            const RenderOptions& options) const;
};

void ChatTemplate::Program::compile() {
  TORCH_CHECK_VALUE(source.size() <= limits.source_bytes,
                    "[ChatTemplate] a template must have at most ",
                    limits.source_bytes, " bytes but got ", source.size(),
                    "; pass another template or raise "
                    "ChatLimits::source_bytes.");
  std::string problem;
  try {
    const jinja::limit_scope scope(engine_limits(limits));
    jinja::lexer lexer;
    program = jinja::parse_from_tokens(lexer.tokenize(source));
  } catch (const std::exception& error) {
    problem = problem_of(error);
  }
  TORCH_CHECK_VALUE(problem.empty(),
                    "[ChatTemplate] the template must compile but ", problem,
                    "; pass another template.");
}

// The names that Hugging Face gives a template, and no more.
void ChatTemplate::Program::set_variables(std::span<const ChatMessage> messages,
                                          const RenderOptions& options,
                                          jinja::context& context) const {
  const auto text = [](const std::string& value) {
    return jinja::mk_val<jinja::value_string>(value);
  };
  context.set_val("bos_token", text(bos));
  context.set_val("eos_token", text(eos));
  context.set_val("messages", messages_value(messages));
  context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(
                                               options.add_generation_prompt));
  context.set_val("documents", jinja::mk_val<jinja::value_none>());
  context.set_val("tools", options.tools_json.empty()
                               ? jinja::mk_val<jinja::value_none>()
                               : json_value(options.tools_json, "tools_json",
                                            JsonKind::kArray));
  if (options.variables_json.empty()) return;
  const jinja::value variables =
      json_value(options.variables_json, "variables_json", JsonKind::kObject);
  for (const auto& [name, value] : variables->as_ordered_object()) {
    context.set_val(name->as_string().str(), value);
  }
}

std::vector<TextPart> ChatTemplate::Program::run(
    std::span<const ChatMessage> messages, const RenderOptions& options) const {
  const jinja::limit_scope scope(engine_limits(limits));
  jinja::context context(source);
  if (options.unix_time) {
    context.current_time = static_cast<std::time_t>(*options.unix_time);
  }
  set_variables(messages, options, context);
  jinja::runtime runtime(context);
  const auto rendered =
      jinja::runtime::gather_string_parts(runtime.execute(program));
  std::vector<TextPart> parts;
  size_t bytes = 0;
  for (const jinja::string_part& part : rendered->val_str.parts) {
    bytes += part.val.size();
    if (!part.val.empty()) {
      parts.push_back({.text = part.val, .special = !part.is_input});
    }
  }
  TORCH_CHECK_VALUE(bytes <= limits.output_bytes,
                    "[ChatTemplate::render] a conversation must render to at "
                    "most ",
                    limits.output_bytes, " bytes but got ", bytes,
                    "; shorten it or raise ChatLimits::output_bytes.");
  return parts;
}

ChatTemplate::ChatTemplate(std::string source, std::string bos, std::string eos,
                           ChatLimits limits) {
  auto program = std::make_unique<Program>(Program{.source = std::move(source),
                                                   .bos = std::move(bos),
                                                   .eos = std::move(eos),
                                                   .limits = limits});
  program->compile();
  program_ = std::move(program);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

const std::string& ChatTemplate::source() const noexcept {
  return program_->source;
}

std::vector<TextPart> ChatTemplate::render(
    std::span<const ChatMessage> messages, const RenderOptions& options) const {
  std::string problem;
  try {
    return program_->run(messages, options);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    problem = problem_of(error);
  }
  TORCH_CHECK_VALUE(false,
                    "[ChatTemplate::render] the template must render this "
                    "conversation but ",
                    problem, "; change the conversation or the template.");
}

}  // namespace kvcache::model
