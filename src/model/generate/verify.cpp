// verify.cpp - a run that was taken up against one that never left.
#include "kvcache/model/verify.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ne.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <variant>

#include "feed.h"

namespace kvcache::model {
namespace {

// Where two tensors of one shape have other bits first: "1, 0, 7".
std::string first_place(const Tensor& a, const Tensor& b) {
  const Tensor differs = at::ne(a, b).flatten();
  int64_t at = differs.to(at::kInt).argmax().item<int64_t>();
  std::vector<int64_t> place(static_cast<size_t>(a.dim()));
  for (size_t i = place.size(); i-- > 0;) {
    const int64_t size = a.size(static_cast<int64_t>(i));
    place[i] = at % size;
    at /= size;
  }
  return c10::Join(", ", place);
}

std::string compare(const std::string& name, const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return name + " is missing on one side";
  if (!a.defined() || at::equal(a, b)) return {};
  if (!a.sizes().equals(b.sizes())) return name + " has another shape";
  return name + " at [" + first_place(a, b) + "]";
}

// Layer by layer, the model's numbers.
std::string compare(const Checkpoint& a, const Checkpoint& b) {
  if (a.length != b.length) return "the lengths";
  size_t attention = 0;
  int64_t conv = 0, state = 0, number = a.first_layer;
  const bool states = !a.points.empty() && !b.points.empty();
  const auto part = [](const Tensor& flat, int64_t& from, int64_t count) {
    if (!flat.defined() || count == 0) return Tensor();
    Tensor values = flat.narrow(1, from, count);
    from += count;
    return values;
  };
  for (const LayerSpec& layer : a.layers) {
    const std::string name = c10::str("layer ", number++, ": ");
    if (std::holds_alternative<AttentionLayer>(layer)) {
      for (const bool keys : {true, false}) {
        const auto which = keys ? &KvTensors::k : &KvTensors::v;
        const std::string found =
            compare(name + (keys ? "K" : "V"), a.kv[attention].*which,
                    b.kv[attention].*which);
        if (!found.empty()) return found;
      }
      ++attention;
      continue;
    }
    if (!states) continue;
    const auto& recurrent = std::get<RecurrentLayer>(layer);
    int64_t width = recurrent.state_shape.empty() ? 0 : 1;
    for (const int64_t size : recurrent.state_shape) width *= size;
    const int64_t taps = recurrent.conv_channels * recurrent.conv_taps;
    int64_t conv_b = conv, state_b = state;
    const RestorePoint &of_a = *a.points.back(), &of_b = *b.points.back();
    std::string found =
        compare(name + "conv inputs", part(of_a.conv, conv, taps),
                part(of_b.conv, conv_b, taps));
    if (found.empty()) {
      found = compare(name + "state", part(of_a.state, state, width),
                      part(of_b.state, state_b, width));
    }
    if (!found.empty()) return found;
  }
  return {};
}

int64_t split_for(const LanguageModel& model, const VerifyOptions& options,
                  int64_t tokens) {
  const bool anywhere = model.row_exact(Role::kPrefill) && model.roles_agree();
  int64_t split = options.split.value_or(tokens / 2);
  if (!options.split && !anywhere) split -= split % options.chunk;
  TORCH_CHECK_VALUE(
      split >= 1 && split < tokens, "[verify_reuse] the split must be in [1, ",
      tokens, ") but got ", split, "; give a longer text, or another split.");
  return split;
}

}  // namespace

VerifyReport verify_reuse(const LanguageModel& model,
                          std::span<const int64_t> tokens,
                          const VerifyOptions& options) {
  check_ids("verify_reuse", tokens, model.vocab_size());
  const auto total = static_cast<int64_t>(tokens.size());
  VerifyReport report{.split = split_for(model, options, total)};
  const CacheOptions room{.capacity = total + options.new_tokens,
                          .kv_format = options.kv_format};
  const auto make = [&] {
    auto cache = make_cache(options.kind, model, room);
    TORCH_CHECK_VALUE(cache,
                      "[verify_reuse] a cache is needed but its kind is "
                      "none; choose another.");
    return cache;
  };
  const AdapterChoice adapter = choose_adapter(
      "verify_reuse", model, options.adapter, options.adapter_from);
  const PrefillOptions prefill_options{.chunk = options.chunk,
                                       .adapter = adapter};
  const ForwardOptions decode = with_adapter({.role = Role::kDecode}, adapter);
  const Tensor ids = ids_tensor(tokens);
  const auto cold = make();
  const Tensor cold_logits = prefill(model, *cold, ids, prefill_options);

  const auto before = make();
  prefill(model, *before, ids.narrow(1, 0, report.split), prefill_options);
  const Checkpoint saved = before->checkpoint(0);
  report.bytes = saved.bytes();
  const auto warm = make();
  warm->restore(saved, 0);
  const Tensor warm_logits =
      prefill(model, *warm, ids.narrow(1, report.split, total - report.split),
              prefill_options);

  const Checkpoint of_cold = cold->checkpoint(0);
  report.layers = static_cast<int64_t>(of_cold.layers.size());
  report.first_difference = compare(of_cold, warm->checkpoint(0));
  Tensor a = cold_logits, b = warm_logits;
  while (report.first_difference.empty()) {
    report.first_difference = compare(
        c10::str("logits after ", total + report.steps, " tokens"), a, b);
    if (!report.first_difference.empty() ||
        ++report.steps > options.new_tokens) {
      break;
    }
    const Tensor next = a.argmax(-1);  // [1, 1]
    a = feed(model, *cold, next, decode);
    b = feed(model, *warm, next, decode);
  }
  return report;
}

}  // namespace kvcache::model
