#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tensor.hpp"

namespace sluice::tools {

/// One tensor of a safetensors file, row-major, little-endian. The bytes belong to the mapped file.
struct StoredTensor {
  DType dtype = DType::f32;
  std::vector<std::uint64_t> shape;  ///< empty: a scalar
  std::span<const std::byte> bytes;  ///< may be unaligned
};

using TensorMap = std::map<std::string, StoredTensor, std::less<>>;

/// Reads the index of one file held in memory. The format: 8 bytes header length (little-endian), a JSON
/// object {name: {dtype, shape, data_offsets: [begin, end)}}, then the data, which the tensors tile without
/// gaps or overlaps. Safe on hostile bytes.
/// @param origin  file name for messages
/// @throws Error{Errc::corrupt} naming file, tensor and cause; Error{Errc::unsupported} for a dtype other than
///         F32, F16 and BF16.
[[nodiscard]] TensorMap parse_safetensors(std::span<const std::byte> file, const std::string& origin);

/// Elements of a tensor as float32, row-major.
/// @throws Error{Errc::invalid_argument} unless `out` has as many floats as the tensor elements.
void to_float(const StoredTensor& tensor, std::span<float> out);

/// A read-only view of a whole file. The file must not shrink while it is mapped.
class MappedFile {
 public:
  /// @throws Error{Errc::not_found}, Error{Errc::io}
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The tensors of a model: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
/// Immutable; safe to share between threads.
class Checkpoint {
 public:
  /// @param path  a directory with one of the two layouts, or one .safetensors file
  /// @throws Error{Errc::not_found} for a missing file or shard, Error{Errc::io}, Error{Errc::corrupt} as
  ///         parse_safetensors and if index and shards disagree.
  explicit Checkpoint(const std::filesystem::path& path);

  [[nodiscard]] const TensorMap& tensors() const noexcept { return tensors_; }
  [[nodiscard]] bool contains(std::string_view name) const { return tensors_.contains(name); }

  /// @throws Error{Errc::not_found} if there is none of this name, Error{Errc::corrupt} if its shape is another.
  [[nodiscard]] const StoredTensor& find(std::string_view name, std::span<const std::uint64_t> shape) const;

 private:
  void add_shard(const std::filesystem::path& file);
  void add_indexed(const std::filesystem::path& index);

  std::string origin_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  TensorMap tensors_;
};

}  // namespace sluice::tools
