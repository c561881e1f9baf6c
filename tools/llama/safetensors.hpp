#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tensor.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {

/// Where one tensor of a checkpoint lies: row-major, little-endian.
struct StoredTensor {
  DType dtype = DType::f32;
  std::vector<std::uint64_t> shape;  ///< empty: a scalar
  std::uint64_t offset = 0;          ///< of its first byte in the file; may be unaligned
  std::uint64_t bytes = 0;           ///< as many as shape and dtype take
  std::uint32_t file = 0;            ///< of the checkpoint's
};

using TensorMap = std::map<std::string, StoredTensor, std::less<>>;

/// Reads the index of one file. The format: 8 bytes header length (little-endian), a JSON object
/// {name: {dtype, shape, data_offsets: [begin, end)}}, then the data, which the tensors tile without gaps or overlaps.
/// Safe on hostile bytes.
/// @param start       the file's first bytes, with the whole header
/// @param file_bytes  of the whole file
/// @param origin      file name for messages
/// @throws Error{Errc::corrupt} naming file, tensor and cause; Error{Errc::unsupported} for a dtype other than
///         F32, F16 and BF16.
[[nodiscard]] TensorMap parse_safetensors(std::span<const std::byte> start, std::uint64_t file_bytes,
                                          const std::string& origin);

/// Stored elements as float32.
/// @param stored  may be unaligned
/// @throws Error{Errc::invalid_argument} unless `out` has as many floats as `stored` elements.
void to_float(DType dtype, std::span<const std::byte> stored, std::span<float> out);

/// The tensors of a model: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
/// Data are read, not mapped: a file that is cut off or cannot be read while the model loads is an error, not a signal.
/// Thread safety: const members from any thread.
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

  /// Bytes of a tensor from `first` on, as they are stored.
  /// @throws Error{Errc::corrupt} if the file was truncated since it was opened, Error{Errc::io}
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const;
  /// A whole tensor.  @throws also Error{Errc::invalid_argument} unless `out` has as many floats as the tensor
  /// elements.
  void read(const StoredTensor& tensor, std::span<float> out) const;
  /// Whether two tensors are the same bit by bit.  @throws as read
  [[nodiscard]] bool equal(const StoredTensor& a, const StoredTensor& b) const;

 private:
  void add_shard(const std::filesystem::path& file);
  void add_indexed(const std::filesystem::path& index);

  std::string origin_;
  std::vector<RegularFile> files_;
  TensorMap tensors_;
};

}  // namespace sluice::tools
