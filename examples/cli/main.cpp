// main.cpp - the kvcache program: real models, real weights, any cache.

#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "examples/cli/commands.h"
#include "examples/cli/errors.h"
#include "examples/cli/terminal.h"
#include "kvcache/version.h"

namespace kvcache::cli {
namespace {

int report(const std::exception& error, int status) {
  write_error_line("kvcache: error: " + message_of(error));
  return status;
}

void describe(CLI::App& app) {
  app.require_subcommand(1);
  app.set_version_flag("--version", [] {
    return "kvcache " + std::string(version()) + " on LibTorch " +
           loaded_libtorch_version();
  });
  add_generate(app);
  add_chat(app);
  add_score(app);
  add_tokenize(app);
  add_inspect(app);
  add_batch(app);
  add_choose(app);
  add_verify(app);
  add_bench(app);
  app.footer(
      "Exit status: 0 done, 1 failed, 2 wrong usage. `kvcache COMMAND --help` "
      "shows an example.");
}

void check_command(CLI::App& app, int argc, char** argv) {
  constexpr const char* kHint = "; `kvcache --help` lists the commands";
  if (argc < 2) throw UsageError(std::string("a command is needed") + kHint);
  const std::string name = argv[1];
  if (name.starts_with('-')) return;
  const auto known = app.get_subcommands(
      [&](CLI::App* command) { return command->check_name(name); });
  if (known.empty()) {
    throw UsageError("there is no command '" + name + "'" + kHint);
  }
}

// The chosen command runs inside parse(), so that its own errors are told from
// those of the command line by their type.
int run(int argc, char** argv) {
  CLI::App app("Generate text with language models over kvcache's caches.",
               "kvcache");
  try {
    check_libtorch();
    describe(app);
    check_command(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {  // --help and --version
    const int status = app.exit(help);
    if (std::cout.flush()) return status;
    return report(std::runtime_error("standard output cannot be written"),
                  kFailed);
  } catch (const CLI::ParseError& error) {
    return report(error, kUsage);
  } catch (const UsageError& error) {
    return report(error, kUsage);
  } catch (const std::exception& error) {
    return report(error, kFailed);
  }
  return 0;
}

}  // namespace
}  // namespace kvcache::cli

int main(int argc, char** argv) {
  try {
    return kvcache::cli::run(argc, argv);
  } catch (...) {
    kvcache::cli::write_error_line("kvcache: error: unknown exception");
    return kvcache::cli::kFailed;
  }
}
