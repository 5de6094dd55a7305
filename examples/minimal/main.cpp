// The README's snippet: text from a model file, through a cache.
#include <c10/util/Exception.h>

#include <iostream>

#include "kvcache/model/generate.h"
#include "kvcache/model/tokenizer.h"
#include "kvcache/model/transformer.h"
#include "kvcache/preallocated_cache.h"

namespace km = kvcache::model;

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: minimal MODEL (a .gguf, or a folder)\n";
    return 2;
  }
  const auto model = km::load_model(argv[1]);
  const auto tokenizer = km::load_tokenizer(argv[1]);
  kvcache::PreallocatedCache cache(model->cache_spec(1, 64));

  const auto prompt = tokenizer->encode("The capital of France is");
  km::generate(*model, &cache, prompt,
               {.max_new_tokens = 16, .tokenizer = tokenizer},
               {.on_text = [](auto text) { std::cout << text << std::flush; }});

  std::cout << '\n' << cache.describe() << '\n';
} catch (const c10::Error& error) {  // what() would add a backtrace
  std::cerr << "minimal: " << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << "minimal: " << error.what() << '\n';
  return 1;
}
