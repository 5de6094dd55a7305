// src/model/forward/forward_options.cpp - what a caller may ask of a forward.
#include "src/model/forward/forward_options.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace kvcache::model {
namespace {

std::string tensor_text(const Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return c10::str(tensor.sizes(), " of ", tensor.scalar_type(), " on ",
                  tensor.device());
}

void check_layers(const ForwardOptions& options, int64_t layers) {
  const int64_t first = options.first_layer, last = *options.last_layer;
  TORCH_CHECK_VALUE(first >= 0 && first <= last && last <= layers,
                    "[Transformer::forward] layers must be a range within [0, ",
                    layers, ") but got [", first, ", ", last,
                    "); count them from 0.");
  TORCH_CHECK_VALUE(
      first == 0 || options.hidden.defined(),
      "[Transformer::forward] what enters layer ", first,
      " must be given but `hidden` is undefined; pass what an earlier forward "
      "returned from its last layer.");
}

void check_hidden(const Tensor& hidden, const Tensor& ids, int64_t width,
                  at::Device device) {
  const std::vector<int64_t> wanted = {ids.size(0), ids.size(1), width};
  TORCH_CHECK_VALUE(
      hidden.sizes() == at::IntArrayRef(wanted) &&
          hidden.scalar_type() == at::kFloat && hidden.device() == device,
      "[Transformer::forward] hidden must be ", at::IntArrayRef(wanted),
      " of Float on ", device, " but got ", tensor_text(hidden),
      "; pass what an earlier forward of the same tokens returned.");
}

void check_positions(const ForwardOptions& options, const Tensor& ids) {
  const Tensor& chosen = options.logit_positions;
  TORCH_CHECK_VALUE(
      !options.all_logits,
      "[Transformer::forward] either all logits or those of logit_positions "
      "must be asked for but both are; leave one of them out.");
  TORCH_CHECK_VALUE(chosen.dim() == 2 && chosen.size(0) == ids.size(0) &&
                        chosen.size(1) > 0 && chosen.scalar_type() == at::kLong,
                    "[Transformer::forward] logit_positions must be [",
                    ids.size(0), ", n] of Long with n above 0 but got ",
                    tensor_text(chosen),
                    "; name as many tokens in each row, -1 for none.");
  if (!chosen.is_cpu()) return;
  const Tensor dense = chosen.contiguous();
  const auto* values = dense.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    TORCH_CHECK_INDEX(values[i] >= -1 && values[i] < ids.size(1),
                      "[Transformer::forward] logit_positions must be in [-1, ",
                      ids.size(1), ") but one of row ", i / dense.size(1),
                      " is ", values[i], "; count the tokens of the step.");
  }
}

void check_logit_ids(const ForwardOptions& options, int64_t vocab_size) {
  const Tensor& ids = options.logit_ids;
  TORCH_CHECK_VALUE(
      ids.dim() == 1 && ids.numel() > 0 && ids.scalar_type() == at::kLong &&
          !options.return_hidden,
      "[Transformer::forward] logit_ids must be [N] of Long with "
      "N above 0, and logits asked for, but got ",
      tensor_text(ids), options.return_hidden ? " for hidden states" : "",
      "; name tokens of the vocabulary.");
  if (!ids.is_cpu()) return;
  const Tensor dense = ids.contiguous();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    const int64_t id = dense.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(id >= 0 && id < vocab_size,
                      "[Transformer::forward] logit_ids must be in [0, ",
                      vocab_size, ") but number ", i, " is ", id,
                      "; use the model's own tokenizer.");
  }
}

bool is_column(const Tensor& numbers, int64_t rows) {
  return numbers.dim() == 1 && numbers.size(0) == rows &&
         numbers.scalar_type() == at::kLong;
}

void check_adapters(const ForwardOptions& options, const Tensor& ids,
                    int64_t adapters) {
  const Tensor& chosen = options.adapters;
  const Tensor& from = options.adapters_from;
  TORCH_CHECK_VALUE(is_column(chosen, ids.size(0)) &&
                        (!from.defined() || is_column(from, ids.size(0))),
                    "[Transformer::forward] adapters and adapters_from must be "
                    "[",
                    ids.size(0), "] of Long but got ", tensor_text(chosen),
                    " and ", tensor_text(from), "; give one of each row.");
  if (!chosen.is_cpu()) return;
  const Tensor dense = chosen.contiguous();
  for (int64_t row = 0; row < dense.numel(); ++row) {
    const int64_t adapter = dense.const_data_ptr<int64_t>()[row];
    TORCH_CHECK_INDEX(adapter >= -1 && adapter < adapters,
                      "[Transformer::forward] adapters must be in [-1, ",
                      adapters, ") but that of row ", row, " is ", adapter,
                      "; give the model its adapters by with_adapters().");
  }
}

}  // namespace

ForwardOptions checked_options(const ForwardOptions& options, const Tensor& ids,
                               const ModelConfig& config, at::Device device,
                               int64_t adapters) {
  ForwardOptions checked = options;
  checked.last_layer = options.last_layer.value_or(config.layers);
  check_layers(checked, config.layers);
  if (*checked.last_layer < config.layers) checked.return_hidden = true;
  if (options.hidden.defined()) {
    check_hidden(options.hidden, ids, config.hidden_size, device);
  }
  if (options.logit_positions.defined()) {
    check_positions(options, ids);
    checked.logit_positions = options.logit_positions.to(device);
  }
  if (options.logit_ids.defined()) {
    check_logit_ids(checked, config.vocab_size);
    checked.logit_ids = options.logit_ids.to(device).contiguous();
  }
  if (options.adapters.defined()) {
    check_adapters(options, ids, adapters);
    checked.adapters = options.adapters.to(device);
    if (options.adapters_from.defined()) {
      checked.adapters_from = options.adapters_from.to(device);
    }
  }
  return checked;
}

}  // namespace kvcache::model
