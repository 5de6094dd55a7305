// terminal.cpp - what goes to a person's terminal and what comes from it.

#include "examples/cli/terminal.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace kvcache::cli {
namespace {

// 128 + SIGINT, as shells report a process that Ctrl-C has ended.
constexpr int kInterruptedStatus = 130;

sigset_t interrupt_only() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

void write_out(std::string_view text) {
  const bool written =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() &&
      std::fflush(stdout) == 0;
  if (!written) {
    throw std::runtime_error("standard output cannot be written: " +
                             std::string(std::strerror(errno)));
  }
}

void write_error_line(std::string_view text) {
  std::fprintf(stderr, "%.*s\n", static_cast<int>(text.size()), text.data());
}

Progress::Progress(bool wanted)
    : terminal_(wanted && isatty(STDERR_FILENO) == 1) {}

void Progress::show(std::string_view what, double fraction) {
  if (!terminal_) return;
  const int percent = static_cast<int>(std::lround(fraction * 100));
  std::string line = std::string(what) + " " + std::to_string(percent) + " %";
  if (line == shown_) return;
  shown_ = std::move(line);
  std::fprintf(stderr, "\r\033[K%s", shown_.c_str());
  std::fflush(stderr);
}

std::function<void(int64_t, int64_t)> Progress::of_prompt() {
  constexpr const char* kWhat = "reading the prompt";
  show(kWhat, 0);  // the first step can take seconds
  return [this](int64_t done, int64_t total) {
    show(kWhat, static_cast<double>(done) / static_cast<double>(total));
    if (done == total) clear();
  };
}

void Progress::clear() {
  if (shown_.empty()) return;
  shown_.clear();
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

Interrupt::Interrupt() {
  // A shell starts background jobs with SIGINT ignored, and an ignored signal
  // is not even queued; asked to stop, this program stops.
  signal(SIGINT, SIG_DFL);
  const sigset_t set = interrupt_only();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  watcher_ = std::jthread([this](const std::stop_token& done) { watch(done); });
}

Interrupt::~Interrupt() {
  watcher_.request_stop();
  watcher_.join();
  const sigset_t set = interrupt_only();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

std::stop_token Interrupt::begin_work() {
  const std::scoped_lock lock(mutex_);
  if (source_.stop_requested()) source_ = std::stop_source();
  working_ = true;
  return source_.get_token();
}

void Interrupt::end_work() {
  const std::scoped_lock lock(mutex_);
  working_ = false;
}

std::stop_token Interrupt::token() const {
  const std::scoped_lock lock(mutex_);
  return source_.get_token();
}

void Interrupt::watch(const std::stop_token& done) {
  const sigset_t set = interrupt_only();
  const timespec patience = {.tv_sec = 0, .tv_nsec = 20'000'000};
  while (!done.stop_requested()) {
    if (sigtimedwait(&set, nullptr, &patience) == SIGINT) received();
  }
}

void Interrupt::received() {
  const std::scoped_lock lock(mutex_);
  // All that was worked out has been written and flushed.
  if (!working_) {
    if (isatty(STDIN_FILENO) == 1) std::fputs("\n", stderr);
    _exit(0);
  }
  if (!source_.request_stop()) _exit(kInterruptedStatus);
}

}  // namespace kvcache::cli
