#include "tools/llama/safetensors.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "sluice/error.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "safetensors is little-endian and is read as it is");

/// Header limit of the reference implementation.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxDepth = 3;
/// Bytes of a file that pass through a buffer at a time: few enough to stay in the cache until they are converted.
constexpr std::uint64_t kTensorPieceBytes = 256 * 1024;

[[noreturn]] void fail_corrupt(const std::string& origin, const std::string& why) {
  throw Error(Errc::corrupt, origin + ": " + why + "; the file is damaged, fetch it again");
}

/// The tensor being read, for messages, and the checks on its entry.
struct EntryReader {
  const std::string& origin;
  const std::string& name;

  [[noreturn]] void fail(const std::string& why) const { fail_corrupt(origin, "tensor '" + name + "': " + why); }

  [[nodiscard]] const json& field(const json& entry, const char* key) const {
    const auto it = entry.find(key);
    if (it == entry.end()) fail(std::string("has no '") + key + "'");
    return *it;
  }

  [[nodiscard]] DType dtype(const json& value) const {
    if (!value.is_string()) fail("'dtype' must be a string, is " + shown(value));
    const auto text = value.get<std::string>();
    if (text == "F32") return DType::f32;
    if (text == "F16") return DType::f16;
    if (text == "BF16") return DType::bf16;
    throw Error(Errc::unsupported, origin + ": tensor '" + name + "' has dtype '" + text +
                                       "'; this host reads F32, F16 and BF16, convert the file");
  }

  [[nodiscard]] std::vector<std::uint64_t> numbers(const json& value, const char* key) const {
    if (!value.is_array()) fail(std::string("'") + key + "' must be an array, is " + shown(value));
    std::vector<std::uint64_t> out;
    for (const json& number : value) {
      if (!number.is_number_unsigned())
        fail(std::string("'") + key + "' must hold integers >= 0, has " + shown(number));
      out.push_back(number.get<std::uint64_t>());
    }
    return out;
  }

  /// Bytes that the shape takes, watching for overflow.
  [[nodiscard]] std::uint64_t byte_count(const StoredTensor& tensor) const {
    std::uint64_t product = bytes_of(tensor.dtype);
    for (const std::uint64_t extent : tensor.shape) {
      if (__builtin_mul_overflow(product, extent, &product)) fail("shape overflows 64 bits");
    }
    return product;
  }

  /// @param data_begin, data_bytes  of the file's data
  [[nodiscard]] StoredTensor read(const json& entry, std::uint64_t data_begin, std::uint64_t data_bytes) const {
    if (!entry.is_object()) fail("entry must be an object, is " + shown(entry));
    StoredTensor tensor;
    tensor.dtype = dtype(field(entry, "dtype"));
    tensor.shape = numbers(field(entry, "shape"), "shape");
    const auto range = numbers(field(entry, "data_offsets"), "data_offsets");
    if (range.size() != 2 || range[0] > range[1]) fail("'data_offsets' must be [begin, end) with begin <= end");
    if (range[1] > data_bytes) {
      fail("data ends at byte " + std::to_string(range[1]) + " of " + std::to_string(data_bytes) +
           ", as in a truncated file");
    }
    if (byte_count(tensor) != range[1] - range[0]) {
      fail("shape and dtype take " + std::to_string(byte_count(tensor)) + " bytes, 'data_offsets' span " +
           std::to_string(range[1] - range[0]));
    }
    tensor.offset = data_begin + range[0];
    tensor.bytes = range[1] - range[0];
    return tensor;
  }
};

/// Tensors must tile the data: overlap means a lying offset, a gap means lost data.
void require_tiling(const TensorMap& tensors, std::uint64_t data_begin, std::uint64_t file_bytes,
                    const std::string& origin) {
  std::vector<const TensorMap::value_type*> parts;
  for (const auto& part : tensors) parts.push_back(&part);
  std::sort(parts.begin(), parts.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.offset, a->second.bytes) < std::pair(b->second.offset, b->second.bytes);
  });
  std::uint64_t expected = data_begin;
  for (const auto* part : parts) {
    const auto& [name, tensor] = *part;
    if (tensor.offset != expected) {
      fail_corrupt(origin, "tensor '" + name + "': data " +
                               (tensor.offset < expected ? "overlaps" : "leaves a gap after") +
                               " the tensor before it");
    }
    expected = tensor.offset + tensor.bytes;
  }
  if (expected != file_bytes) fail_corrupt(origin, "data goes on after the last tensor");
}

float half_to_float(std::uint16_t bits) {
  return static_cast<float>(Eigen::half(Eigen::half_impl::raw_uint16_to_half(bits)));
}

template <float (*kConvert)(std::uint16_t)>
void convert(std::span<const std::byte> bytes, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t bits = 0;  // the file may be unaligned
    std::memcpy(&bits, bytes.data() + i * sizeof bits, sizeof bits);
    out[i] = kConvert(bits);
  }
}

std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (const std::uint64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

void require_fit(DType dtype, std::uint64_t stored_bytes, std::span<const float> out) {
  if (stored_bytes == out.size() * bytes_of(dtype)) return;
  throw Error(Errc::invalid_argument, "a tensor of " + std::to_string(stored_bytes) + " bytes does not fill " +
                                          std::to_string(out.size()) + " floats");
}

/// What a clone without Git LFS has in place of a large file.
bool is_lfs_pointer(std::span<const std::byte> start) {
  constexpr std::string_view kBegins = "version ";  // Read as a length, more than any file has.
  return start.size() >= kBegins.size() && std::memcmp(start.data(), kBegins.data(), kBegins.size()) == 0;
}

/// Where the header ends and the data begin.
std::uint64_t header_end(std::span<const std::byte> start, std::uint64_t file_bytes, const std::string& origin) {
  std::uint64_t header_bytes = 0;
  if (file_bytes < sizeof header_bytes) fail_corrupt(origin, "shorter than its 8-byte header length");
  if (is_lfs_pointer(start)) {
    throw Error(Errc::corrupt, origin + ": a pointer of Git LFS, not the file itself; run `git lfs pull` where it is");
  }
  std::memcpy(&header_bytes, start.data(), sizeof header_bytes);
  if (header_bytes > file_bytes - sizeof header_bytes || header_bytes > kMaxHeaderBytes) {
    fail_corrupt(origin, "header length " + std::to_string(header_bytes) + " exceeds the file's " +
                             std::to_string(file_bytes) + " bytes or the format's 100 MB");
  }
  return sizeof header_bytes + header_bytes;
}

}  // namespace

TensorMap parse_safetensors(std::span<const std::byte> start, std::uint64_t file_bytes, const std::string& origin) {
  const std::uint64_t data_begin = header_end(start, file_bytes, origin);
  const auto text = start.subspan(sizeof(std::uint64_t), data_begin - sizeof(std::uint64_t));
  const json header = parse_json({reinterpret_cast<const char*>(text.data()), text.size()}, origin, kMaxDepth);
  if (!header.is_object()) fail_corrupt(origin, "header must be a JSON object");
  TensorMap tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    tensors.emplace(name, EntryReader{origin, name}.read(entry, data_begin, file_bytes - data_begin));
  }
  require_tiling(tensors, data_begin, file_bytes, origin);
  return tensors;
}

void to_float(DType dtype, std::span<const std::byte> stored, std::span<float> out) {
  require_fit(dtype, stored.size(), out);
  switch (dtype) {
    case DType::f32:
      if (!stored.empty()) std::memcpy(out.data(), stored.data(), stored.size());
      return;
    case DType::f16: return convert<half_to_float>(stored, out);
    case DType::bf16: return convert<from_bf16>(stored, out);
    case DType::fp8_e4m3: break;  // No tensor has it, see dtype().
  }
}

Checkpoint::Checkpoint(const std::filesystem::path& path) : origin_(path.string()) {
  if (!std::filesystem::is_directory(path)) {
    add_shard(path);
  } else if (const auto single = path / "model.safetensors"; std::filesystem::exists(single)) {
    add_shard(single);
  } else if (const auto index = path / "model.safetensors.index.json"; std::filesystem::exists(index)) {
    add_indexed(index);
  } else {
    throw Error(Errc::not_found, origin_ +
                                     ": neither model.safetensors nor model.safetensors.index.json; "
                                     "is this a Hugging Face model directory?");
  }
}

void Checkpoint::add_shard(const std::filesystem::path& path) {
  const auto index = static_cast<std::uint32_t>(files_.size());
  const RegularFile& file = files_.emplace_back(path);
  std::vector<std::byte> start(std::min<std::uint64_t>(file.bytes(), sizeof(std::uint64_t)));
  file.read(0, start);
  start.resize(header_end(start, file.bytes(), file.name()));
  file.read(0, start);
  for (auto& [name, tensor] : parse_safetensors(start, file.bytes(), file.name())) {
    tensor.file = index;
    if (!tensors_.emplace(name, std::move(tensor)).second) {
      throw Error(Errc::corrupt, file.name() + ": tensor '" + name + "' is in another shard too; remove one of them");
    }
  }
}

void Checkpoint::add_indexed(const std::filesystem::path& index) {
  const std::string origin = index.string();
  const json document = parse_json(read_text_file(index), origin, kMaxDepth);
  if (!document.is_object() || !document.contains("weight_map") || !document["weight_map"].is_object()) {
    fail_corrupt(origin, "has no object 'weight_map'");
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : document["weight_map"].items()) {
    if (!shard.is_string())
      fail_corrupt(origin, "tensor '" + name + "': shard must be a file name, is " + shown(shard));
    const std::filesystem::path file(shard.get<std::string>());
    // The operating system would read a name up to its first zero byte.
    if (file.empty() || file != file.filename() || file.native().find('\0') != std::string::npos) {
      fail_corrupt(origin, "tensor '" + name + "': shard '" + file.string() + "' must be a file beside the index");
    }
    shards.insert(file.string());
  }
  for (const std::string& shard : shards) {
    const std::filesystem::path file = index.parent_path() / shard;
    if (!std::filesystem::exists(file)) {
      throw Error(Errc::not_found, file.string() + ": is missing, and " + index.filename().string() +
                                       " names it; fetch the model again, all of its files");
    }
    add_shard(file);
  }
  for (const auto& [name, shard] : document["weight_map"].items()) {
    if (!contains(name)) {
      throw Error(Errc::not_found, origin + ": tensor '" + name + "' should be in " + shard.get<std::string>() +
                                       " and is not; index and shards are of different models");
    }
  }
}

const StoredTensor& Checkpoint::find(std::string_view name, std::span<const std::uint64_t> shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    throw Error(Errc::not_found, origin_ + ": tensor '" + std::string(name) +
                                     "' is missing; the checkpoint is incomplete or not a Llama");
  }
  const StoredTensor& tensor = it->second;
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    throw Error(Errc::corrupt, origin_ + ": tensor '" + std::string(name) + "' has shape " + shape_text(tensor.shape) +
                                   ", config.json asks for " + shape_text(shape) + "; the two are of different models");
  }
  return tensor;
}

void Checkpoint::read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const {
  if (first > tensor.bytes || out.size() > tensor.bytes - first) {
    throw Error(Errc::invalid_argument, "bytes " + std::to_string(first) + " to " + std::to_string(first + out.size()) +
                                            " of a tensor that has " + std::to_string(tensor.bytes));
  }
  files_[tensor.file].read(tensor.offset + first, out);
}

void Checkpoint::read(const StoredTensor& tensor, std::span<float> out) const {
  require_fit(tensor.dtype, tensor.bytes, out);
  if (tensor.dtype == DType::f32) return read(tensor, 0, std::as_writable_bytes(out));
  const std::uint64_t width = bytes_of(tensor.dtype);
  std::vector<std::byte> piece(std::min(tensor.bytes, kTensorPieceBytes));
  for (std::uint64_t done = 0; done < tensor.bytes; done += piece.size()) {
    piece.resize(std::min(tensor.bytes - done, kTensorPieceBytes));
    read(tensor, done, piece);
    to_float(tensor.dtype, piece, out.subspan(done / width, piece.size() / width));
  }
}

bool Checkpoint::equal(const StoredTensor& a, const StoredTensor& b) const {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  std::vector<std::byte> left;
  std::vector<std::byte> right;
  for (std::uint64_t done = 0; done < a.bytes; done += left.size()) {
    left.resize(std::min(a.bytes - done, kTensorPieceBytes));
    right.resize(left.size());
    read(a, done, left);
    read(b, done, right);
    if (left != right) return false;
  }
  return true;
}

}  // namespace sluice::tools
