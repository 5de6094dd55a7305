// commands.h - the commands of the program. Each adds itself to the command
// line and runs when it was chosen.
#pragma once

#include <CLI/CLI.hpp>

namespace kvcache::cli {

void add_generate(CLI::App& app);
void add_chat(CLI::App& app);
void add_score(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_inspect(CLI::App& app);
void add_batch(CLI::App& app);
void add_choose(CLI::App& app);
void add_verify(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace kvcache::cli
