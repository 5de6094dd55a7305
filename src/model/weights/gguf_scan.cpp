// gguf_scan.cpp - checks a GGUF file before ggml's parser
// reads it.
//
// The parser asserts, divides by and allocates what the file says. This pass
// walks the header, the metadata and the tensor list once, allocates nothing
// but two sets of names, and refuses what the parser would trip over.
// Source: docs/gguf.md of ggml and the reader of ggml-base 0.20.

#include <c10/util/Exception.h>
#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>

#include "kvcache/model/gguf.h"
#include "src/model/weights/strict_json.h"  // in_quotes

namespace kvcache::model {
namespace {

// Far above any real file (about 60 keys, 2,000 tensors, 512 k merges), low
// enough that the parser's pairwise search for equal names stays short.
constexpr uint64_t kMaxKeys = 4096;
constexpr uint64_t kMaxTensors = 16384;
constexpr uint64_t kMaxStrings = uint64_t{1} << 24;  // in one array

constexpr uint32_t kOldestVersion = 2;
constexpr uint64_t kMinAlignment = 8;  // the format: a multiple of 8

// Bytes of one value, 0 for types without a fixed size.
size_t value_bytes(uint32_t type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
      return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
      return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
      return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

class Scanner {
 public:
  Scanner(std::span<const std::byte> file, const std::string& path)
      : file_(file), path_(path) {}

  void scan() {
    scan_header();
    for (uint64_t i = 0; i < key_count_; ++i) scan_key(i);
    for (uint64_t i = 0; i < tensor_count_; ++i) scan_tensor(i);
    check_data();
  }

 private:
  template <typename... Parts>
  void require(bool holds, const Parts&... parts) const {
    TORCH_CHECK(holds, "[check_gguf] ", path_, ": ", parts...,
                "; the file is truncated, damaged or hostile, fetch it again.");
  }

  size_t left() const noexcept { return file_.size() - position_; }

  template <typename T>
  T take(std::string_view what) {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(std::endian::native == std::endian::little);
    require(left() >= sizeof(T), what, " needs ", sizeof(T), " bytes but ",
            left(), " are left");
    T value;
    std::memcpy(&value, file_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  // ggml hands strings out without their length, so none may contain a zero.
  std::string_view take_string(std::string_view what) {
    const auto length = take<uint64_t>(what);
    require(length <= left(), what, " has a text of ", length, " bytes but ",
            left(), " are left");
    const auto* text = reinterpret_cast<const char*>(file_.data() + position_);
    require(std::memchr(text, '\0', length) == nullptr, what,
            " has a text with a zero byte");
    position_ += length;
    return {text, length};
  }

  void scan_header() {
    const auto magic = take<std::array<char, 4>>("the magic");
    TORCH_CHECK(std::string_view(magic.data(), 4) == GGUF_MAGIC,
                "[check_gguf] ", path_, " must begin with GGUF but has ",
                in_quotes({magic.data(), 4}), "; this is no GGUF file.");
    const auto version = take<uint32_t>("the version");
    require(version >= kOldestVersion && version <= GGUF_VERSION,
            "the version must be ", kOldestVersion, " to ", GGUF_VERSION,
            " but is ", version);
    tensor_count_ = take<uint64_t>("the number of tensors");
    require(tensor_count_ <= kMaxTensors, "the number of tensors must not ",
            "exceed ", kMaxTensors, " but is ", tensor_count_);
    key_count_ = take<uint64_t>("the number of keys");
    require(key_count_ <= kMaxKeys, "the number of keys must not exceed ",
            kMaxKeys, " but is ", key_count_);
  }

  void scan_key(uint64_t number) {
    const std::string_view key = take_string("key " + std::to_string(number));
    const std::string name = "key " + in_quotes(key);
    require(!key.empty(), "key ", number, " has an empty name");
    require(names_.insert(key).second, name, " stands twice");
    const auto type = take<uint32_t>(name);
    require(type < GGUF_TYPE_COUNT, name, " must be of type 0 to ",
            GGUF_TYPE_COUNT - 1, " but is ", type);
    if (key == GGUF_KEY_GENERAL_ALIGNMENT) return scan_alignment(type);
    if (type == GGUF_TYPE_STRING) {
      take_string(name);
    } else if (type == GGUF_TYPE_ARRAY) {
      scan_array(name);
    } else {
      skip(value_bytes(type), name);
    }
  }

  void scan_alignment(uint32_t type) {
    require(type == GGUF_TYPE_UINT32,
            "key \"general.alignment\" must be a u32 "
            "but is ",
            gguf_type_name(static_cast<gguf_type>(type)));
    alignment_ = take<uint32_t>(GGUF_KEY_GENERAL_ALIGNMENT);
    require(alignment_ >= kMinAlignment && std::has_single_bit(alignment_),
            "key \"general.alignment\" must be a power of two from ",
            kMinAlignment, " but is ", alignment_);
  }

  void scan_array(const std::string& name) {
    const auto type = take<uint32_t>(name);
    require(type < GGUF_TYPE_COUNT && type != GGUF_TYPE_ARRAY, name,
            " must be an array of plain values but its elements are of type ",
            type);
    const auto count = take<uint64_t>(name);
    if (type != GGUF_TYPE_STRING) {
      const size_t bytes = value_bytes(type);
      require(count <= left() / bytes, name, " has ", count, " elements of ",
              bytes, " bytes but ", left(), " bytes are left");
      return skip(count * bytes, name);
    }
    require(count <= left() / sizeof(uint64_t) && count <= kMaxStrings, name,
            " has ", count, " texts but ", left(), " bytes are left");
    for (uint64_t i = 0; i < count; ++i) take_string(name);
  }

  void skip(size_t bytes, std::string_view what) {
    require(bytes <= left(), what, " needs ", bytes, " bytes but ", left(),
            " are left");
    position_ += bytes;
  }

  void scan_tensor(uint64_t number) {
    const std::string_view name =
        take_string("tensor " + std::to_string(number));
    const std::string what = "tensor " + in_quotes(name);
    require(!name.empty() && name.size() < GGML_MAX_NAME, what,
            " must have a name of 1 to ", GGML_MAX_NAME - 1, " bytes but has ",
            name.size());
    require(tensors_.insert(name).second, what, " stands twice");
    const auto dims = take<uint32_t>(what);
    require(dims >= 1 && dims <= GGML_MAX_DIMS, what, " must have 1 to ",
            GGML_MAX_DIMS, " dimensions but has ", dims);
    int64_t first = 0;
    int64_t values = 1;
    for (uint32_t i = 0; i < dims; ++i) {
      const auto size = take<int64_t>(what);
      require(size >= 1, what, " has the size ", size, " in dimension ", i);
      require(!__builtin_mul_overflow(values, size, &values), what,
              " has more values than fit in 64 bits");
      if (i == 0) first = size;
    }
    const auto type = take<uint32_t>(what);
    const auto* traits =
        type < GGML_TYPE_COUNT
            ? ggml_get_type_traits(static_cast<ggml_type>(type))
            : nullptr;
    require(traits != nullptr && traits->blck_size > 0 && traits->type_size > 0,
            what, " has the type ", type, ", which is unknown");
    require(first % traits->blck_size == 0, what, " has rows of ", first,
            " values, no multiple of the ", traits->blck_size,
            " of a block of ", traits->type_name);
    size_t bytes = 0;
    require(
        !__builtin_mul_overflow(static_cast<size_t>(values / traits->blck_size),
                                traits->type_size, &bytes),
        what, " has more bytes than fit in 64 bits");
    check_place(what, take<uint64_t>(what), bytes);
  }

  // Tensors follow each other, each padded to the alignment.
  void check_place(const std::string& what, uint64_t offset, size_t bytes) {
    require(offset == data_bytes_, what, " begins at byte ", offset,
            " of the data but the tensors before it end at ", data_bytes_);
    require(bytes <= file_.size() - std::min(offset, file_.size()), what,
            " needs ", bytes, " bytes from byte ", offset,
            " of the data but the file has ", file_.size());
    data_end_ = offset + bytes;
    data_bytes_ = padded(data_end_);
  }

  void check_data() const {
    if (tensor_count_ == 0) return;
    const uint64_t begin = padded(position_);
    require(begin <= file_.size() && data_end_ <= file_.size() - begin,
            "the tensors need ", data_end_, " bytes from byte ", begin,
            " on but the file has ", file_.size());
  }

  // Neither operand reaches 2^63: sizes of files and an alignment of 32 bits.
  uint64_t padded(uint64_t bytes) const noexcept {
    return (bytes + alignment_ - 1) / alignment_ * alignment_;
  }

  std::span<const std::byte> file_;
  const std::string& path_;
  size_t position_ = 0;
  uint64_t tensor_count_ = 0;
  uint64_t key_count_ = 0;
  uint64_t alignment_ = GGUF_DEFAULT_ALIGNMENT;
  uint64_t data_end_ = 0;    // of the last tensor, within the data
  uint64_t data_bytes_ = 0;  // the same, padded
  std::unordered_set<std::string_view> names_;
  std::unordered_set<std::string_view> tensors_;
};

}  // namespace

void check_gguf(std::span<const std::byte> file, const std::string& path) {
  Scanner(file, path).scan();
}

}  // namespace kvcache::model
