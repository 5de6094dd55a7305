// gguf.cpp - typed access to ggml's parse of a GGUF file.

#include "kvcache/model/gguf.h"

#include <c10/util/Exception.h>
#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "src/model/weights/strict_json.h"  // in_quotes

namespace kvcache::model {
namespace {

// Calls `use` with a value of the C++ type that stores a number of `type`;
// answers false for texts, arrays and bools.
template <typename Use>
bool with_number_type(gguf_type type, const Use& use) {
  switch (type) {
    case GGUF_TYPE_UINT8:
      return use(uint8_t{}), true;
    case GGUF_TYPE_INT8:
      return use(int8_t{}), true;
    case GGUF_TYPE_UINT16:
      return use(uint16_t{}), true;
    case GGUF_TYPE_INT16:
      return use(int16_t{}), true;
    case GGUF_TYPE_UINT32:
      return use(uint32_t{}), true;
    case GGUF_TYPE_INT32:
      return use(int32_t{}), true;
    case GGUF_TYPE_UINT64:
      return use(uint64_t{}), true;
    case GGUF_TYPE_INT64:
      return use(int64_t{}), true;
    case GGUF_TYPE_FLOAT32:
      return use(float{}), true;
    case GGUF_TYPE_FLOAT64:
      return use(double{}), true;
    default:
      return false;
  }
}

bool is_real(gguf_type type) {
  return type == GGUF_TYPE_FLOAT32 || type == GGUF_TYPE_FLOAT64;
}

bool is_integer(gguf_type type) {
  return !is_real(type) && with_number_type(type, [](auto) {});
}

// `count` values of `type` as T. The storage need not be aligned.
template <typename T>
std::vector<T> converted(gguf_type type, const void* data, size_t count) {
  std::vector<T> out(count);
  with_number_type(type, [&](auto zero) {
    const auto* bytes = static_cast<const std::byte*>(data);
    for (size_t i = 0; i < count; ++i) {
      auto value = zero;
      std::memcpy(&value, bytes + i * sizeof value, sizeof value);
      out[i] = static_cast<T>(value);
    }
  });
  return out;
}

void check_type(const std::filesystem::path& path, std::string_view key,
                bool holds, const char* want, gguf_type type,
                const char* prefix = "") {
  TORCH_CHECK(holds, "[GgufFile] ", path.string(), ": key ", in_quotes(key),
              " must be ", want, " but is ", prefix, gguf_type_name(type),
              "; the file is damaged or was made by a faulty converter.");
}

template <typename T>
T required(std::optional<T> value, const std::filesystem::path& path,
           std::string_view key) {
  TORCH_CHECK(value.has_value(), "[GgufFile] ", path.string(), ": key ",
              in_quotes(key),
              " is missing; convert the model again with a current tool.");
  return std::move(*value);
}

template <typename T>
void widen(const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<float>(value);
  }
}

// Plain number types, for which ggml has no conversion. False for others.
bool read_plain(int type, const std::byte* data, int64_t count, float* out) {
  switch (type) {
    case GGML_TYPE_F32:
      std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
      return true;
    case GGML_TYPE_F64:
      return widen<double>(data, count, out), true;
    case GGML_TYPE_I8:
      return widen<int8_t>(data, count, out), true;
    case GGML_TYPE_I16:
      return widen<int16_t>(data, count, out), true;
    case GGML_TYPE_I32:
      return widen<int32_t>(data, count, out), true;
    case GGML_TYPE_I64:
      return widen<int64_t>(data, count, out), true;
    default:
      return false;
  }
}

}  // namespace

void GgufFile::Free::operator()(gguf_context* context) const noexcept {
  gguf_free(context);
}

GgufFile::GgufFile(std::filesystem::path path) : file_(std::move(path)) {
  check_gguf(file_.bytes(), file_.path().string());
  context_.reset(gguf_init_from_buffer(file_.bytes().data(),
                                       file_.bytes().size(),
                                       {.no_alloc = true, .ctx = nullptr}));
  TORCH_CHECK(context_ != nullptr, "[GgufFile] ", file_.path().string(),
              " was refused by ggml's parser; fetch the file again.");
  const int64_t keys = gguf_get_n_kv(context_.get());
  for (int64_t i = 0; i < keys; ++i)
    keys_.emplace(gguf_get_key(context_.get(), i), i);
  index_tensors();
}

GgufFile::~GgufFile() = default;

void GgufFile::index_tensors() {
  const gguf_context* context = context_.get();
  const int64_t count = gguf_get_n_tensors(context);
  const auto data = file_.bytes().subspan(
      count > 0 ? gguf_get_data_offset(context) : file_.bytes().size());
  for (int64_t i = 0; i < count; ++i) {
    const ggml_type type = gguf_get_tensor_type(context, i);
    const int64_t* sizes = gguf_get_tensor_ne(context, i);
    GgufTensor tensor;
    tensor.name = gguf_get_tensor_name(context, i);
    // ggml counts dimensions from the dense one and fills up with ones.
    int dims = GGML_MAX_DIMS;
    while (dims > 1 && sizes[dims - 1] == 1) --dims;
    tensor.shape.assign(std::make_reverse_iterator(sizes + dims),
                        std::make_reverse_iterator(sizes));
    tensor.type = type;
    tensor.type_name = ggml_type_name(type);
    tensor.quantised = ggml_is_quantized(type);
    tensor.row_values = sizes[0];
    tensor.row_bytes = ggml_row_size(type, sizes[0]);
    tensor.data = data.subspan(gguf_get_tensor_offset(context, i),
                               gguf_get_tensor_size(context, i));
    tensors_.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < tensors_.size(); ++i)
    index_.emplace(tensors_[i].name, i);
}

const GgufTensor* GgufFile::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void GgufFile::read_rows(const GgufTensor& tensor, int64_t first, int64_t count,
                         float* out) const {
  const auto rows = static_cast<int64_t>(tensor.data.size() / tensor.row_bytes);
  TORCH_CHECK(first >= 0 && count >= 0 && first <= rows - count,
              "[GgufFile::read_rows] rows ", first, " to ", first + count,
              " of ", in_quotes(tensor.name), " must lie in 0 to ", rows, ".");
  const std::byte* data =
      tensor.data.data() + static_cast<size_t>(first) * tensor.row_bytes;
  const int64_t values = count * tensor.row_values;
  if (read_plain(tensor.type, data, values, out)) return;
  const auto* traits =
      ggml_get_type_traits(static_cast<ggml_type>(tensor.type));
  TORCH_CHECK(traits->to_float != nullptr, "[GgufFile::read_rows] ",
              path().string(), ": tensor ", in_quotes(tensor.name), " is ",
              tensor.type_name,
              ", which ggml cannot turn into numbers; quantise the model to "
              "another type.");
  traits->to_float(data, out, values);
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> names(keys_.size());
  for (const auto& [name, id] : keys_) names[static_cast<size_t>(id)] = name;
  return names;
}

bool GgufFile::has(std::string_view key) const noexcept {
  return keys_.contains(key);
}

std::optional<int64_t> GgufFile::id_of(std::string_view key) const noexcept {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return std::nullopt;
  return found->second;
}

std::optional<int64_t> GgufFile::find_integer(std::string_view key) const {
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(context_.get(), *id);
  check_type(path(), key, is_integer(type), "a whole number", type);
  const void* data = gguf_get_val_data(context_.get(), *id);
  const int64_t value = converted<int64_t>(type, data, 1)[0];
  TORCH_CHECK(type != GGUF_TYPE_UINT64 || value >= 0, "[GgufFile] ",
              path().string(), ": key ", in_quotes(key), " must not exceed ",
              INT64_MAX, " but is ", static_cast<uint64_t>(value),
              "; the file is damaged.");
  return value;
}

std::optional<double> GgufFile::find_number(std::string_view key) const {
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(context_.get(), *id);
  check_type(path(), key, is_real(type), "a floating-point number", type);
  return converted<double>(type, gguf_get_val_data(context_.get(), *id), 1)[0];
}

std::optional<bool> GgufFile::find_bool(std::string_view key) const {
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(context_.get(), *id);
  check_type(path(), key, type == GGUF_TYPE_BOOL, "a bool", type);
  return gguf_get_val_bool(context_.get(), *id);
}

std::optional<std::string_view> GgufFile::find_string(
    std::string_view key) const {
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(context_.get(), *id);
  check_type(path(), key, type == GGUF_TYPE_STRING, "a text", type);
  return gguf_get_val_str(context_.get(), *id);
}

// The type of the elements of array `key`.
int GgufFile::element_type(std::string_view key, int64_t id,
                           const char* want) const {
  const gguf_type type = gguf_get_kv_type(context_.get(), id);
  check_type(path(), key, type == GGUF_TYPE_ARRAY, want, type);
  return gguf_get_arr_type(context_.get(), id);
}

std::optional<std::vector<int64_t>> GgufFile::find_integers(
    std::string_view key) const {
  constexpr const char* kWant = "an array of whole numbers";
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const auto type = static_cast<gguf_type>(element_type(key, *id, kWant));
  check_type(path(), key, is_integer(type), kWant, type, "an array of ");
  return converted<int64_t>(type, gguf_get_arr_data(context_.get(), *id),
                            gguf_get_arr_n(context_.get(), *id));
}

std::optional<std::vector<float>> GgufFile::find_numbers(
    std::string_view key) const {
  constexpr const char* kWant = "an array of floating-point numbers";
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const auto type = static_cast<gguf_type>(element_type(key, *id, kWant));
  check_type(path(), key, is_real(type), kWant, type, "an array of ");
  return converted<float>(type, gguf_get_arr_data(context_.get(), *id),
                          gguf_get_arr_n(context_.get(), *id));
}

std::optional<std::vector<bool>> GgufFile::find_bools(
    std::string_view key) const {
  constexpr const char* kWant = "an array of bools";
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const auto type = static_cast<gguf_type>(element_type(key, *id, kWant));
  check_type(path(), key, type == GGUF_TYPE_BOOL, kWant, type, "an array of ");
  const auto* data =
      static_cast<const int8_t*>(gguf_get_arr_data(context_.get(), *id));
  std::vector<bool> flags(gguf_get_arr_n(context_.get(), *id));
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = data[i] != 0;
  return flags;
}

std::optional<std::vector<std::string_view>> GgufFile::find_strings(
    std::string_view key) const {
  constexpr const char* kWant = "an array of texts";
  const auto id = id_of(key);
  if (!id) return std::nullopt;
  const auto type = static_cast<gguf_type>(element_type(key, *id, kWant));
  check_type(path(), key, type == GGUF_TYPE_STRING, kWant, type,
             "an array of ");
  std::vector<std::string_view> texts(gguf_get_arr_n(context_.get(), *id));
  for (size_t i = 0; i < texts.size(); ++i)
    texts[i] = gguf_get_arr_str(context_.get(), *id, i);
  return texts;
}

int64_t GgufFile::integer(std::string_view key) const {
  return required(find_integer(key), path(), key);
}
double GgufFile::number(std::string_view key) const {
  return required(find_number(key), path(), key);
}
bool GgufFile::boolean(std::string_view key) const {
  return required(find_bool(key), path(), key);
}
std::string_view GgufFile::string(std::string_view key) const {
  return required(find_string(key), path(), key);
}
std::vector<int64_t> GgufFile::integers(std::string_view key) const {
  return required(find_integers(key), path(), key);
}
std::vector<float> GgufFile::numbers(std::string_view key) const {
  return required(find_numbers(key), path(), key);
}
std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  return required(find_strings(key), path(), key);
}

bool GgufFile::is_array(std::string_view key) const {
  const auto id = id_of(key);
  return id && gguf_get_kv_type(context_.get(), *id) == GGUF_TYPE_ARRAY;
}

std::string GgufFile::describe(std::string_view key) const {
  const auto id = id_of(key);
  if (!id) return {};
  const gguf_type type = gguf_get_kv_type(context_.get(), *id);
  std::ostringstream out;
  if (type == GGUF_TYPE_ARRAY) {
    out << gguf_get_arr_n(context_.get(), *id) << " x "
        << gguf_type_name(gguf_get_arr_type(context_.get(), *id));
  } else if (type == GGUF_TYPE_STRING) {
    out << *find_string(key);
  } else if (type == GGUF_TYPE_BOOL) {
    out << (*find_bool(key) ? "true" : "false");
  } else if (is_real(type)) {
    out << *find_number(key);
  } else {
    out << *find_integer(key);
  }
  return out.str();
}

}  // namespace kvcache::model
