// bench_worker.h - `bench --worker`: speeds on request, with the model loaded
// once.
#pragma once

#include <cstdint>

#include "examples/cli/options.h"

namespace kvcache::cli {

// Writes one line when the model is there, then answers each line of standard
// input by one of standard output, until the input ends. docs: bench/README.md.
//
// A request: `prompts` (lists of ids; several run at the same time, a slot
// each), `new` (tokens of each), `cache` (in the place of --cache), `space`
// (goes on from earlier requests of that name), `crop` (then cut so many tokens
// and make as many new ones). A request that is wrong gets an `error`.
void serve_bench(const ModelOptions& options, int64_t prefix_cache_mb);

}  // namespace kvcache::cli
