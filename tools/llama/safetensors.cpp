#include "tools/llama/safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "sluice/error.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "safetensors is little-endian and is mapped as it is");

/// Header limit of the reference implementation.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxDepth = 3;

[[noreturn]] void fail_corrupt(const std::string& origin, const std::string& why) {
  throw Error(Errc::corrupt, origin + ": " + why + "; the file is damaged, fetch it again");
}

/// Parses JSON and refuses what nlohmann would let pass: a name given twice (the last would win) and nesting
/// deeper than the format has.
json parse_strictly(std::string_view text, const std::string& origin) {
  std::vector<std::set<std::string>> names;
  const auto inspect = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) fail_corrupt(origin, "JSON is nested too deeply");
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second) {
      fail_corrupt(origin, "'" + value.get<std::string>() + "' appears twice");
    }
    return true;
  };
  try {
    return json::parse(text, inspect);
  } catch (const json::exception& e) {
    fail_corrupt(origin, std::string("malformed JSON: ") + e.what());
  }
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
    if (!value.is_string()) fail("'dtype' must be a string, is " + value.dump());
    const auto text = value.get<std::string>();
    if (text == "F32") return DType::f32;
    if (text == "F16") return DType::f16;
    if (text == "BF16") return DType::bf16;
    throw Error(Errc::unsupported, origin + ": tensor '" + name + "' has dtype '" + text +
                                       "'; this host reads F32, F16 and BF16, convert the file");
  }

  [[nodiscard]] std::vector<std::uint64_t> numbers(const json& value, const char* key) const {
    if (!value.is_array()) fail(std::string("'") + key + "' must be an array, is " + value.dump());
    std::vector<std::uint64_t> out;
    for (const json& number : value) {
      if (!number.is_number_unsigned())
        fail(std::string("'") + key + "' must hold integers >= 0, has " + number.dump());
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

  [[nodiscard]] StoredTensor read(const json& entry, std::span<const std::byte> data) const {
    if (!entry.is_object()) fail("entry must be an object, is " + entry.dump());
    StoredTensor tensor;
    tensor.dtype = dtype(field(entry, "dtype"));
    tensor.shape = numbers(field(entry, "shape"), "shape");
    const auto range = numbers(field(entry, "data_offsets"), "data_offsets");
    if (range.size() != 2 || range[0] > range[1]) fail("'data_offsets' must be [begin, end) with begin <= end");
    if (range[1] > data.size()) {
      fail("data ends at byte " + std::to_string(range[1]) + " of " + std::to_string(data.size()) + ": truncated?");
    }
    if (byte_count(tensor) != range[1] - range[0]) {
      fail("shape and dtype take " + std::to_string(byte_count(tensor)) + " bytes, 'data_offsets' span " +
           std::to_string(range[1] - range[0]));
    }
    tensor.bytes = data.subspan(range[0], range[1] - range[0]);
    return tensor;
  }
};

/// Tensors must tile the data: overlap means a lying offset, a gap means lost data.
void require_tiling(const TensorMap& tensors, std::span<const std::byte> data, const std::string& origin) {
  std::vector<std::pair<std::span<const std::byte>, const std::string*>> parts;
  for (const auto& [name, tensor] : tensors) parts.emplace_back(tensor.bytes, &name);
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.data(), a.first.size()) < std::pair(b.first.data(), b.first.size());
  });
  const std::byte* expected = data.data();
  for (const auto& [bytes, name] : parts) {
    if (bytes.data() != expected) {
      fail_corrupt(origin, "tensor '" + *name + "': data " +
                               (bytes.data() < expected ? "overlaps" : "leaves a gap after") + " the tensor before it");
    }
    expected = bytes.data() + bytes.size();
  }
  if (expected != data.data() + data.size()) fail_corrupt(origin, "data goes on after the last tensor");
}

float half_to_float(std::uint16_t bits) {
  return static_cast<float>(Eigen::half(Eigen::half_impl::raw_uint16_to_half(bits)));
}

float bfloat_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

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

}  // namespace

TensorMap parse_safetensors(std::span<const std::byte> file, const std::string& origin) {
  std::uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) fail_corrupt(origin, "shorter than its 8-byte header length");
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const auto rest = file.subspan(sizeof header_bytes);
  if (header_bytes > rest.size() || header_bytes > kMaxHeaderBytes) {
    fail_corrupt(origin, "header length " + std::to_string(header_bytes) + " exceeds the file's " +
                             std::to_string(file.size()) + " bytes or the format's 100 MB");
  }
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), header_bytes);
  const auto data = rest.subspan(header_bytes);

  const json header = parse_strictly(text, origin);
  if (!header.is_object()) fail_corrupt(origin, "header must be a JSON object");
  TensorMap tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    tensors.emplace(name, EntryReader{origin, name}.read(entry, data));
  }
  require_tiling(tensors, data, origin);
  return tensors;
}

void to_float(const StoredTensor& tensor, std::span<float> out) {
  if (tensor.bytes.size() != out.size() * bytes_of(tensor.dtype)) {
    throw Error(Errc::invalid_argument, "a tensor of " + std::to_string(tensor.bytes.size()) + " bytes does not fill " +
                                            std::to_string(out.size()) + " floats");
  }
  switch (tensor.dtype) {
    case DType::f32: std::memcpy(out.data(), tensor.bytes.data(), tensor.bytes.size()); return;
    case DType::f16: return convert<half_to_float>(tensor.bytes, out);
    case DType::bf16: return convert<bfloat_to_float>(tensor.bytes, out);
  }
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  const auto fail = [&](const char* what, int cause) {
    throw Error(cause == ENOENT ? Errc::not_found : Errc::io,
                path.string() + ": " + what + ": " + std::strerror(cause));
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail("cannot open", errno);
  struct Close {
    int file;
    ~Close() { ::close(file); }
  } close{file};

  struct stat info {};
  if (::fstat(file, &info) != 0) fail("cannot stat", errno);
  if (!S_ISREG(info.st_mode)) fail("not a regular file", S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;  // mmap refuses an empty range
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  if (data == MAP_FAILED) fail("cannot map", errno);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
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

void Checkpoint::add_shard(const std::filesystem::path& file) {
  files_.push_back(std::make_unique<MappedFile>(file));
  for (auto& [name, tensor] : parse_safetensors(files_.back()->bytes(), file.string())) {
    if (!tensors_.emplace(name, std::move(tensor)).second) {
      throw Error(Errc::corrupt, file.string() + ": tensor '" + name + "' is in another shard too; remove one of them");
    }
  }
}

void Checkpoint::add_indexed(const std::filesystem::path& index) {
  const std::string origin = index.string();
  const json document = parse_strictly(read_text_file(index), origin);
  if (!document.is_object() || !document.contains("weight_map") || !document["weight_map"].is_object()) {
    fail_corrupt(origin, "has no object 'weight_map'");
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : document["weight_map"].items()) {
    if (!shard.is_string())
      fail_corrupt(origin, "tensor '" + name + "': shard must be a file name, is " + shard.dump());
    const std::filesystem::path file(shard.get<std::string>());
    if (file.empty() || file != file.filename()) {
      fail_corrupt(origin, "tensor '" + name + "': shard '" + file.string() + "' must be a file beside the index");
    }
    shards.insert(file.string());
  }
  for (const std::string& shard : shards) add_shard(index.parent_path() / shard);
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

}  // namespace sluice::tools
