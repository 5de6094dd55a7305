// kvcache/model/log.h - how the library tells its caller something.
//
// The library prints nothing. What is worth saying goes to a sink that the
// caller gives; without one it is dropped.

#pragma once

#include <functional>
#include <string_view>

namespace kvcache::model {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// One message, one line without a line end. Called on the thread that works.
using LogSink = std::function<void(LogLevel, std::string_view)>;

// What opening files needs beside a path.
struct OpenOptions {
  LogSink log;
};

}  // namespace kvcache::model
