// tensor_names.cpp - names of transformers' modules, per family.
//
// Source: the modules of modeling_llama.py (mistral, qwen2 and qwen3 use the
// same names), modeling_gpt2.py and modeling_qwen3_5.py of Hugging Face
// transformers.

#include "src/model/weights/tensor_names.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace kvcache::model {
namespace {

using Name = std::pair<std::string_view, std::string_view>;

constexpr std::array<Name, 2> kLlamaGlobal{
    {{"embed_tokens", "token_embd"}, {"norm", "output_norm"}}};

constexpr std::array<Name, 11> kLlamaLayer{
    {{"input_layernorm", "attn_norm"},
     {"self_attn.q_proj", "attn_q"},
     {"self_attn.k_proj", "attn_k"},
     {"self_attn.v_proj", "attn_v"},
     {"self_attn.o_proj", "attn_output"},
     {"self_attn.q_norm", "attn_q_norm"},
     {"self_attn.k_norm", "attn_k_norm"},
     {"post_attention_layernorm", "ffn_norm"},
     {"mlp.gate_proj", "ffn_gate"},
     {"mlp.up_proj", "ffn_up"},
     {"mlp.down_proj", "ffn_down"}}};

constexpr std::array<Name, 3> kGpt2Global{
    {{"wte", "token_embd"}, {"wpe", "position_embd"}, {"ln_f", "output_norm"}}};

constexpr std::array<Name, 6> kGpt2Layer{{{"ln_1", "attn_norm"},
                                          {"attn.c_attn", "attn_qkv"},
                                          {"attn.c_proj", "attn_output"},
                                          {"ln_2", "ffn_norm"},
                                          {"mlp.c_fc", "ffn_up"},
                                          {"mlp.c_proj", "ffn_down"}}};

constexpr std::array<Name, 18> kHybridLayer{
    {{"input_layernorm", "attn_norm"},
     {"self_attn.q_proj", "attn_q"},
     {"self_attn.k_proj", "attn_k"},
     {"self_attn.v_proj", "attn_v"},
     {"self_attn.o_proj", "attn_output"},
     {"self_attn.q_norm", "attn_q_norm"},
     {"self_attn.k_norm", "attn_k_norm"},
     {"linear_attn.in_proj_qkv", "attn_qkv"},
     {"linear_attn.in_proj_z", "attn_gate"},
     {"linear_attn.in_proj_b", "ssm_beta"},
     {"linear_attn.in_proj_a", "ssm_alpha"},
     {"linear_attn.conv1d", "ssm_conv1d"},
     {"linear_attn.norm", "ssm_norm"},
     {"linear_attn.out_proj", "ssm_out"},
     {"post_attention_layernorm", "ffn_norm"},
     {"mlp.gate_proj", "ffn_gate"},
     {"mlp.up_proj", "ffn_up"},
     {"mlp.down_proj", "ffn_down"}}};

// Parameters of a module that are neither ".weight" nor ".bias".
constexpr std::array<Name, 2> kHybridParameters{
    {{"linear_attn.A_log", "ssm_a"}, {"linear_attn.dt_bias", "ssm_dt.bias"}}};

struct Family {
  std::string_view root;    // may stand before every name
  std::string_view inner;   // may follow the root: the text part of a model
  std::string_view layers;  // stands before a layer's number
  std::span<const Name> global;
  std::span<const Name> layer;
  std::span<const Name> parameters{};  // of a layer, under their whole names
};

constexpr Family kLlama{"model.", "", "layers.", kLlamaGlobal, kLlamaLayer};
constexpr Family kGpt2{"transformer.", "", "h.", kGpt2Global, kGpt2Layer};
constexpr Family kHybrid{"model.",     "language_model.", "layers.",
                         kLlamaGlobal, kHybridLayer,      kHybridParameters};

// A model that sees writes the inner root, a text model does not.
constexpr std::string_view kSeeing = "qwen3_5";

bool is_hybrid(std::string_view architecture) {
  return architecture.starts_with(kSeeing);
}

const Family& family_of(std::string_view architecture) {
  if (is_hybrid(architecture)) return kHybrid;
  return architecture == "gpt2" ? kGpt2 : kLlama;
}

// Parts of a file beside the text model: the tower for images and the layers
// that draft the token after next.
constexpr std::array<std::string_view, 4> kOtherParts{
    "model.visual.", "visual.", "mtp.", "model.mtp."};

std::optional<std::string_view> lookup(std::span<const Name> names,
                                       std::string_view module) {
  const auto found =
      std::find_if(names.begin(), names.end(),
                   [&](const Name& name) { return name.first == module; });
  if (found == names.end()) return std::nullopt;
  return found->second;
}

// "12.rest": the number without leading zeros, and what follows its dot.
std::optional<std::pair<std::string_view, std::string_view>> split_number(
    std::string_view text) {
  const size_t dot = text.find('.');
  const std::string_view digits = text.substr(0, dot);
  const bool number =
      !digits.empty() && digits.size() <= 4 &&
      std::all_of(digits.begin(), digits.end(),
                  [](char c) { return c >= '0' && c <= '9'; }) &&
      (digits.size() == 1 || digits[0] != '0');
  if (dot == std::string_view::npos || !number) return std::nullopt;
  return std::pair(digits, text.substr(dot + 1));
}

// Tables that old checkpoints carry although they follow from the sizes.
bool is_buffer(std::string_view in_layer) {
  return in_layer == "self_attn.rotary_emb.inv_freq" ||
         in_layer == "attn.bias" || in_layer == "attn.masked_bias";
}

}  // namespace

std::string_view other_part(std::string_view architecture,
                            std::string_view name) {
  if (!is_hybrid(architecture)) return {};
  for (const std::string_view part : kOtherParts)
    if (name.starts_with(part)) return part;
  return {};
}

std::optional<CanonicalName> canonical_name(std::string_view architecture,
                                            std::string_view name) {
  const Family& family = family_of(architecture);
  if (name == "lm_head.weight") return CanonicalName{"output.weight"};
  if (!other_part(architecture, name).empty()) return CanonicalName{};
  for (const std::string_view root : {family.root, family.inner})
    if (name.starts_with(root)) name.remove_prefix(root.size());
  std::string prefix;
  std::span<const Name> names = family.global;
  if (name.starts_with(family.layers)) {
    const auto parts = split_number(name.substr(family.layers.size()));
    if (!parts) return std::nullopt;
    if (is_buffer(parts->second)) return CanonicalName{};
    prefix = "blk." + std::string(parts->first) + ".";
    names = family.layer;
    name = parts->second;
    if (const auto whole = lookup(family.parameters, name)) {
      const bool decay = *whole == "ssm_a";
      return CanonicalName{prefix + std::string(*whole),
                           decay ? Stored::kLogDecay : Stored::kAsItIs};
    }
  }
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view kind = name.substr(dot);  // ".weight", ".bias"
  const std::string_view module = name.substr(0, dot);
  const auto found = lookup(names, module);
  if (!found || (kind != ".weight" && kind != ".bias")) return std::nullopt;
  CanonicalName canonical{prefix + std::string(*found) + std::string(kind)};
  const bool matrix = kind == ".weight";
  if (matrix && architecture == "gpt2" &&
      module.find(".c_") != std::string_view::npos)
    canonical.stored = Stored::kTransposed;
  if (matrix && *found == "ssm_conv1d") canonical.stored = Stored::kChannels;
  return canonical;
}

std::string hugging_face_name(std::string_view architecture,
                              std::string_view canonical) {
  if (canonical == "output.weight") return "lm_head.weight";
  const Family& family = family_of(architecture);
  std::string prefix(family.root);
  if (architecture == kSeeing) prefix += family.inner;
  std::span<const Name> names = family.global;
  std::string_view rest = canonical;
  if (rest.starts_with("blk.")) {
    const auto parts = split_number(rest.substr(4));
    if (!parts) return std::string(canonical);
    prefix += std::string(family.layers) + std::string(parts->first) + ".";
    names = family.layer;
    rest = parts->second;
    for (const auto& [whole, name] : family.parameters)
      if (name == rest) return prefix + std::string(whole);
  }
  const size_t dot = rest.rfind('.');
  if (dot == std::string_view::npos) return std::string(canonical);
  const std::string_view kind = rest.substr(dot);
  rest = rest.substr(0, dot);
  for (const auto& [module, name] : names)
    if (name == rest) return prefix + std::string(module) + std::string(kind);
  return std::string(canonical);
}

}  // namespace kvcache::model
