// kvcache/model/chat_template.h - a conversation as the text a model expects.
//
// Renders the Jinja template that comes with a model. The result says of each
// piece whether the template or the conversation wrote it, so that a turn
// marker in a message stays text (see encode_chat).

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant", "tool"
  std::string content;
  // A JSON object with what else the template may ask for: tool_calls, name,
  // reasoning_content, ... Empty: nothing. It wins over role and content.
  std::string extra_json = {};
};

// A template is untrusted input: each limit throws when it is passed.
struct ChatLimits {
  size_t source_bytes = 512 << 10;
  size_t output_bytes = 16 << 20;
  size_t memory_bytes = 256 << 20;  // made while rendering, about
  int64_t steps = 5'000'000;        // evaluated expressions and statements
  int64_t depth = 200;              // nesting, of source and of calls
  std::chrono::milliseconds time{10'000};
};

struct RenderOptions {
  bool add_generation_prompt = true;
  std::string tools_json = {};      // a JSON array; empty: no tools
  std::string variables_json = {};  // a JSON object of more variables
  // What strftime_now() tells the template; empty: the clock.
  std::optional<int64_t> unix_time = {};
};

// A compiled template. Immutable, so safe to share between threads.
//
// Errors: a template that does not compile throws on construction; one that
// fails, refuses the conversation (raise_exception) or passes a limit throws
// from render(). The message carries the template's own words.
class ChatTemplate {
 public:
  // `bos` and `eos`: what the template's bos_token and eos_token stand for.
  explicit ChatTemplate(std::string source, std::string bos = {},
                        std::string eos = {}, ChatLimits limits = {});
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // `special` of a part: the template wrote it.
  std::vector<TextPart> render(std::span<const ChatMessage> messages,
                               const RenderOptions& options = {}) const;
  const std::string& source() const noexcept;

 private:
  struct Program;
  std::unique_ptr<const Program> program_;
};

// The ids of a rendered conversation. Control tokens come only out of parts
// that the template wrote; apart from that, the parts are one text, so that
// ordinary content gives the ids of the whole text tokenised at once. Exactly
// one begin token if the template wrote one or the model declares one.
std::vector<int64_t> encode_chat(const Tokenizer& tokenizer,
                                 std::span<const TextPart> parts);

// The template of a model: of a .gguf file, or of a folder with
// chat_template.jinja or tokenizer_config.json. `name` chooses one of several
// (GGUF and tokenizer_config.json may hold "default", "tool_use", ...).
// Empty if the model has none; throws if `name` is not among them.
std::optional<std::string> load_chat_template(
    const std::filesystem::path& path, std::string_view name = "default");

}  // namespace kvcache::model
