// kvcache/model/adapter.h - low-rank adapters (LoRA) of a model.
//
// A linear with an adapter gives W x + b + scale * B (A x). Several adapters
// stand beside one set of weights; each row of a step names its own:
//
//   auto model = load_model(path);
//   auto adapted = model->with_adapters(
//       {load_adapter("adapters/fr", "fr", model->config())});
//   generate(*adapted, cache.get(), tokens, {.adapter = "fr"});
//
// r rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kvcache/model/config.h"

namespace kvcache::model {

// What is added to one matrix of the model. Float32, contiguous, on the CPU.
struct AdapterModule {
  std::string weight;  // "blk.3.attn_q.weight": the matrix, [out, in]
  at::Tensor a;        // [r, in]
  at::Tensor b;        // [out, r], times the scale
};

struct Adapter {
  std::string name;    // what requests call it
  std::string digest;  // of all that changes results
  std::vector<AdapterModule> modules;
};

// An adapter of a model, as it is known outside of it.
struct AdapterInfo {
  std::string name;
  std::string digest;
  // The first layer that it changes: those below are the model's own.
  int64_t first_layer = 0;
};

// Reads adapter_config.json and adapter_model.safetensors of `folder`, as PEFT
// writes them, for a model of `config`. Supported is plain LoRA on the linears
// of the layers: r, lora_alpha, use_rslora, target_modules (a list),
// layers_to_transform. The files are untrusted: every tensor is accounted for,
// and its shape checked against the model.
// Errors: a field that asks for more than that is named; a tensor that is
// missing, unexpected or of another shape too.
Adapter load_adapter(const std::filesystem::path& folder, std::string name,
                     const ModelConfig& config);

// Throws, naming `function`, unless every module is a linear of a layer of
// `config`, named once, of its shape, and the names of adapters are there and
// differ.
void check_adapters(const char* function, const std::vector<Adapter>& adapters,
                    const ModelConfig& config);

// The layer of "blk.3.attn_q.weight".
int64_t layer_of(const AdapterModule& module);

}  // namespace kvcache::model
