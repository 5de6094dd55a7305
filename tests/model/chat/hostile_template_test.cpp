// Chat templates that are wrong, or want too much.

#include <chrono>
#include <thread>

#include "tests/model/chat/rendering.h"

namespace kvcache::model::test {
namespace {

using testing::HasSubstr;

TEST(ChatTemplate, ErrorsNameTheProblemAndThePlace) {
  EXPECT_EQ(render_error("{{ raise_exception('No system messages.') }}"),
            "[ChatTemplate::render] the template must render this conversation "
            "but Jinja Exception: No system messages. at line 1, column 19; "
            "change the conversation or the template.");
  EXPECT_EQ(render_error("a\n{% for m in messages %}"),
            "[ChatTemplate] the template must compile but Unexpected end of "
            "template at line 2, column 24; pass another template.");
  EXPECT_THAT(render_error("{{ 'a' | nonsense }}"),
              HasSubstr("filter 'nonsense'"));
  EXPECT_THAT(render_error("{% include 'x' %}"),
              HasSubstr("Unknown statement: include at line 1"));
  EXPECT_THAT(render_error("{{ messages[0].content + 1 }}"), HasSubstr("no"));
  for (const char* source : {"{{",
                             "{%",
                             "{#",
                             "{{ 'a }}",
                             "{{ a. }}",
                             "{{ (1 }}",
                             "{% if %}",
                             "{% endif %}",
                             "{{ '\\",
                             "{{ 1 2 }}",
                             "{% set %}",
                             "}}{{",
                             "{{ [1 }}",
                             "{{ {1:2 }}",
                             "{% for %}{% endfor %}",
                             "{% call x %}",
                             "{{-",
                             "{{ - }}",
                             "{{ 99999999999999999999 }}",
                             "{% macro %}",
                             "{{ a[ }}",
                             "{% filter"}) {
    EXPECT_THAT(render_error(source), HasSubstr("[ChatTemplate")) << source;
  }
}

TEST(ChatTemplate, JsonThatIsNoneIsAnError) {
  const ChatTemplate chat("{{ messages[0].role }}");
  const ChatMessage broken{
      .role = "user", .content = "", .extra_json = "{\"a\": "};
  EXPECT_THAT(error_of([&] { chat.render(std::span(&broken, 1)); }),
              HasSubstr("extra_json of message 0 must be JSON but "));
  const ChatMessage fine{.role = "user", .content = ""};
  EXPECT_THAT(
      error_of([&] { chat.render(std::span(&fine, 1), {.tools_json = "{}"}); }),
      HasSubstr("tools_json must be a JSON array but got object"));
  const std::string deep(5000, '[');
  EXPECT_THAT(error_of([&] {
                chat.render(
                    std::span(&fine, 1),
                    {.tools_json = deep + std::string(deep.size(), ']')});
              }),
              HasSubstr("nested more than 200 deep"));
}

std::string repeat(std::string_view unit, size_t times) {
  std::string text;
  for (size_t i = 0; i < times; ++i) text += unit;
  return text;
}

struct Hostile {
  const char* name;
  std::string source;
  const char* problem;
};

void PrintTo(const Hostile& hostile, std::ostream* out) {
  *out << hostile.name;
}

std::vector<Hostile> hostile_templates() {
  const std::string loops =
      "{% for a in range(1000) %}{% for b in range(1000) %}"
      "{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}";
  const std::string twice =
      "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
      "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}";
  const std::string list_twice =
      "{% set n = namespace(s=[1]) %}{% for i in range(60) %}"
      "{% set n.s = n.s + n.s %}{% endfor %}";
  const std::string nest_loop =
      "{% set n = namespace(s=[]) %}{% for i in range(30000) %}"
      "{% set n.s = [n.s] %}{% endfor %}";
  const std::string tuple_twice =
      "{% set n = namespace(s=(1,2)) %}{% for i in range(60) %}"
      "{% set n.s = (n.s, n.s) %}{% endfor %}";
  return {
      {"nested_loops", loops, "steps"},
      {"big_range", "{% for a in range(1000000000) %}{% endfor %}",
       "more than"},
      {"big_range_by_step", "{{ range(0, 9223372036854775807, 1) | length }}",
       "more than"},
      {"doubled_text", twice, "bytes of memory"},
      {"doubled_list", list_twice, "steps"},
      {"repeated_text", "{{ 'abc' * 1000000000 }}", "more than"},
      {"repeated_nothing", "{{ '' * 1000000000000 }}", "more than"},
      {"replaced_nothing",
       "{% set a = 'a' * 100000 %}{{ a | replace('', a) | length }}",
       "bytes of memory"},
      {"replaced_twice",
       "{% set a = 'a' * 100000 %}{{ a | replace('a', a) | length }}",
       "bytes of memory"},
      {"slow_search",
       "{% set a = 'a' * 4000000 %}{% set b = 'a' * 2000000 ~ 'b' %}"
       "{{ b in a }}",
       "steps"},
      {"wide_indent", "{{ 'a' | indent(100000000000) }}", "bytes of memory"},
      {"wide_json", "{{ [[[1]]] | tojson(indent=2000000000) }}", nullptr},
      {"joined", "{{ range(1000) | join('x' * 1000000) }}", "bytes of memory"},
      {"endless_macro", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
       "deep"},
      {"two_macros",
       "{% macro f(x) %}{{ g(x) }}{{ g(x) }}{% endmacro %}"
       "{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
       "deep"},
      {"bushy_macro",
       "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
       "{% endmacro %}{{ f(40) }}",
       "more than"},
      {"parentheses",
       "{{ " + repeat("(", 100000) + "1" + repeat(")", 100000) + " }}", "deep"},
      {"brackets", "{{ " + repeat("[", 100000) + repeat("]", 100000) + " }}",
       "deep"},
      {"nots", "{{ " + repeat("not ", 100000) + "1 }}", "deep"},
      {"minuses", "{{ " + repeat("- ", 100000) + "1 }}", "deep"},
      {"pluses", "{{ 1" + repeat("+1", 100000) + " }}", "deep"},
      {"members", "{{ a" + repeat(".a", 100000) + " }}", "deep"},
      {"calls", "{{ a" + repeat("()", 100000) + " }}", "deep"},
      {"filters", "{{ a" + repeat("|trim", 100000) + " }}", "deep"},
      {"ternaries", "{{ " + repeat("1 if 1 else ", 30000) + "1 }}", "deep"},
      {"elifs", "{% if 0 %}" + repeat("{% elif 0 %}", 30000) + "{% endif %}",
       "deep"},
      {"ifs", repeat("{% if 1 %}", 20000) + repeat("{% endif %}", 20000),
       "deep"},
      {"nested_value", nest_loop + "{{ n.s }}", "deep"},
      {"nested_json", nest_loop + "{{ n.s | tojson }}", "deep"},
      {"nested_text", nest_loop + "{{ n.s | string }}", "deep"},
      {"nested_equal", nest_loop + "{{ n.s == n.s }}", nullptr},
      {"nested_only", nest_loop, nullptr},
      {"bushy_tuple_json", tuple_twice + "{{ n.s | tojson }}", "more than"},
      {"bushy_tuple_text", tuple_twice + "{{ n.s }}", "more than"},
      {"bushy_tuple_key", tuple_twice + "{{ {n.s: 1} }}", "more than"},
      {"bushy_tuple_equal", tuple_twice + "{{ n.s == n.s }}", "more than"},
      {"cycle_namespace",
       "{% set n = namespace() %}{% set n.a = n %}{{ n | tojson }}", "deep"},
      {"cycle_list",
       "{% set a = [] %}{% set b = a.append(a) %}{{ a | string }}", "deep"},
      {"cycle_two",
       "{% set a = [] %}{% set b = [a] %}{% set c = a.append(b) %}{{ a == b }}",
       nullptr},
      {"cycle_method",
       "{% set a = [] %}{% set b = a.append(a.append) %}{{ a }}", nullptr},
      {"cycle_quiet", "{% set n = namespace() %}{% set n.n = n %}", nullptr},
      {"division", "{{ 1 is divisibleby 0 }}", "division by zero"},
      {"smallest_division",
       "{{ (-9223372036854775807 - 1) is divisibleby -1 }}", nullptr},
      {"smallest", "{{ -9223372036854775808 | abs }}", "overflow"},
      {"steps_over_the_end",
       "{{ range(9223372036854775800, 9223372036854775807, 5) | length }}",
       nullptr},
      {"slice_over_the_end", "{{ 'abc'[0:3:9223372036854775807] }}", nullptr},
      {"slice_backwards", "{{ 'abc'[::-9223372036854775808] }}", nullptr},
      {"sorted_mixture",
       "{% set n = namespace(s=[]) %}{% for i in range(3000) %}{% set n.s = "
       "n.s + [i, 'x', none, 1.5, true, [i]] %}{% endfor %}"
       "{{ n.s | sort | length }}",
       nullptr},
      {"long_source", repeat("{{ 1 }}", 100000), "at most 524288 bytes"},
      {"carriage_returns", repeat("\r\n", 200000), nullptr},
  };
}

class HostileTemplate : public testing::TestWithParam<Hostile> {};

// Either refused for the reason given, or rendered; always soon.
TEST_P(HostileTemplate, IsRefusedOrRenderedSoon) {
  const auto start = std::chrono::steady_clock::now();
  const std::string problem = render_error(GetParam().source);
  const auto took = std::chrono::steady_clock::now() - start;
  // The limit of ten seconds, and one single operation in progress.
  EXPECT_LT(took, std::chrono::seconds(20));
  if (GetParam().problem != nullptr) {
    // A slow machine comes to the limit on time before the others.
    EXPECT_THAT(problem, testing::AnyOf(HasSubstr(GetParam().problem),
                                        HasSubstr("more than 10000 ms")));
  }
  EXPECT_THAT(problem, testing::Not(HasSubstr("\n")));
  EXPECT_LT(problem.size(), 1000u);
}

INSTANTIATE_TEST_SUITE_P(, HostileTemplate,
                         testing::ValuesIn(hostile_templates()),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

TEST(ChatTemplate, TheTimeLimitHolds) {
  const ChatLimits limits{.steps = 1'000'000'000'000,
                          .time = std::chrono::milliseconds(50)};
  EXPECT_THAT(render_error("{% for a in range(900) %}{% for b in range(900) %}"
                           "{% for c in range(900) %}{% endfor %}{% endfor %}"
                           "{% endfor %}",
                           limits),
              HasSubstr("more than 50 ms"));
}

TEST(ChatTemplate, TheOutputLimitHolds) {
  EXPECT_EQ(render_error("{{ messages[0].content }}!", {.output_bytes = 100},
                         std::string(100, 'a')),
            "[ChatTemplate::render] a conversation must render to at most 100 "
            "bytes but got 101; shorten it or raise ChatLimits::output_bytes.");
  EXPECT_EQ(render_error("{{ messages[0].content }}", {.output_bytes = 100},
                         std::string(100, 'a')),
            "no error");
}

// A refused conversation leaves the template as it was.
TEST(ChatTemplate, CanBeUsedAfterAnError) {
  const ChatTemplate chat(
      "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif "
      "%}{{ messages[0].content }}");
  const ChatMessage no{.role = "user", .content = "no"};
  const ChatMessage yes{.role = "user", .content = "yes"};
  EXPECT_THAT(error_of([&] { chat.render(std::span(&no, 1)); }),
              HasSubstr("Jinja Exception: no"));
  EXPECT_EQ(text_of(chat.render(std::span(&yes, 1))), "yes");
}

TEST(ChatTemplate, IsSharedBetweenThreads) {
  const ChatTemplate chat(chat_file("qwen3.jinja"), "", "");
  std::vector<ChatMessage> messages;
  for (int i = 0; i < 20; ++i) {
    messages.push_back({.role = i % 2 == 0 ? "user" : "assistant",
                        .content = "turn " + std::to_string(i)});
  }
  const std::string expected = text_of(chat.render(messages));
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (std::string& text : texts) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) text = text_of(chat.render(messages));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : texts) EXPECT_EQ(text, expected);
}

// A conversation of ten thousand turns is no reason to refuse.
TEST(ChatTemplate, LongConversationsRender) {
  std::vector<ChatMessage> messages;
  for (int i = 0; i < 10'000; ++i) {
    messages.push_back({.role = i % 2 == 0 ? "user" : "assistant",
                        .content = "turn " + std::to_string(i)});
  }
  for (const char* file : {"smollm2.jinja", "qwen2.5.jinja", "qwen3.jinja",
                           "llama-3.1.jinja", "mistral-nemo.jinja"}) {
    const ChatTemplate chat(chat_file(file), "<s>", "</s>");
    EXPECT_THAT(text_of(chat.render(messages)), HasSubstr("turn 9999")) << file;
  }
  const ChatMessage long_one{.role = "user",
                             .content = std::string(4 << 20, 'a')};
  const ChatTemplate chat(chat_file("qwen3.jinja"), "", "");
  EXPECT_GT(text_of(chat.render(std::span(&long_one, 1))).size(), 4u << 20);
}

TEST(ChatTemplate, TellsTheTimeItIsGiven) {
  const ChatTemplate chat("{{ strftime_now('%Y') }}");
  EXPECT_EQ(text_of(chat.render({}, {.unix_time = 1'000'000'000})), "2001");
}

TEST(ChatTemplate, TextThatIsNotUtf8PassesThrough) {
  EXPECT_EQ(rendered("{{ messages[0].content }}", "a\xFF\x80z"), "a\xFF\x80z");
}

}  // namespace
}  // namespace kvcache::model::test
