// terminal.h - what goes to a person's terminal and what comes from it.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

namespace kvcache::cli {

// Writes to standard output at once; throws if it cannot.
void write_out(std::string_view text);
void write_error_line(std::string_view text);

// One line on standard error that is rewritten in place. Silent unless that is
// a terminal.
class Progress {
 public:
  explicit Progress(bool wanted = true);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(std::string_view what, double fraction);
  // Shows that a prompt is being read, from now on; for on_prefill hooks.
  std::function<void(int64_t done, int64_t total)> of_prompt();
  void clear();

 private:
  bool terminal_;
  std::string shown_;
};

// Turns Ctrl-C into a stop request while there is work; a second one ends the
// process. Without work, the first one ends it, with success.
//
// Make it before any other thread: they inherit that the signal is blocked.
class Interrupt {
 public:
  Interrupt();  // with work
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // What was asked of earlier work no longer counts.
  std::stop_token begin_work();
  void end_work();
  std::stop_token token() const;

 private:
  void watch(const std::stop_token& done);
  void received();

  mutable std::mutex mutex_;
  std::stop_source source_;
  bool working_ = true;
  std::jthread watcher_;
};

}  // namespace kvcache::cli
