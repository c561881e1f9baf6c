#include "capi/tensor.hpp"

#include <cstddef>
#include <limits>
#include <string>

#include "capi/guard.hpp"

namespace sluice::capi {
namespace {

/// What DLPack's tensors look like in memory on all platforms of 64 bits.
static_assert(sizeof(void*) != 8 || (offsetof(sluice_tensor, device) == 8 && offsetof(sluice_tensor, ndim) == 16 &&
                                     offsetof(sluice_tensor, dtype) == 20 && offsetof(sluice_tensor, shape) == 24 &&
                                     offsetof(sluice_tensor, strides) == 32 &&
                                     offsetof(sluice_tensor, byte_offset) == 40 && sizeof(sluice_tensor) == 48));

/// Where a tensor breaks the rules: the argument's name, then what is wrong and what to do.
class Checked {
 public:
  Checked(const sluice_tensor* tensor, const char* name) : name_(name) {
    require_pointer(tensor, name);
    tensor_ = tensor;
  }

  void require(bool holds, const std::string& message) const { capi::require(holds, name_ + message); }

  void require_rank(std::int32_t rank, const char* shape) const {
    require(tensor_->ndim == rank,
            ".ndim is " + std::to_string(tensor_->ndim) + "; it must be " + std::to_string(rank) + ", for " + shape);
    require(tensor_->shape != nullptr, ".shape is null; give it the address of ndim sizes");
    for (std::int32_t i = 0; i < rank; ++i) {
      require(tensor_->shape[i] >= 0 && tensor_->shape[i] <= std::numeric_limits<std::uint32_t>::max(),
              ".shape[" + std::to_string(i) + "] is " + std::to_string(tensor_->shape[i]) +
                  "; it must be a number of tokens, heads or channels");
    }
  }

  void require_place(const Place& place) const {
    const std::int32_t type = tensor_->device.device_type;
    const std::int32_t id = tensor_->device.device_id;
    const std::string is = ".device is of type " + std::to_string(type);
    if (place.device_type == SLUICE_DEVICE_CPU) {
      require(type == SLUICE_DEVICE_CPU || type == SLUICE_DEVICE_CUDA_HOST,
              is + ", and the engine computes on the host; copy the tensor to host memory (1 or 3), or create the "
                   "engine with device_type SLUICE_DEVICE_CUDA");
      return;
    }
    require(type == SLUICE_DEVICE_CUDA || type == SLUICE_DEVICE_CUDA_MANAGED || type == SLUICE_DEVICE_CUDA_HOST,
            is + ", and the engine computes on a GPU; copy the tensor to its memory (2), or to pinned memory (3)");
    require(type == SLUICE_DEVICE_CUDA_HOST || id == place.device_id,
            ".device is GPU " + std::to_string(id) + ", and the engine's is " + std::to_string(place.device_id) +
                "; copy the tensor there");
  }

  [[nodiscard]] DType dtype() const {
    const auto& type = tensor_->dtype;
    if (type.lanes == 1) {
      if (type.code == SLUICE_TYPE_FLOAT && type.bits == 32) return DType::f32;
      if (type.code == SLUICE_TYPE_FLOAT && type.bits == 16) return DType::f16;
      if (type.code == SLUICE_TYPE_BFLOAT && type.bits == 16) return DType::bf16;
    }
    throw Error(Errc::invalid_argument,
                name_ + ".dtype has code " + std::to_string(type.code) + ", " + std::to_string(type.bits) +
                    " bits and " + std::to_string(type.lanes) +
                    " lanes; convert it to f32 (code 2, 32 bits), f16 (2, 16) or bf16 (4, 16), 1 lane");
  }

  /// Elements from one index of dimension `i` to the next. Where there is but one, nothing is read of it.
  [[nodiscard]] std::uint64_t stride(std::int32_t i) const {
    if (tensor_->strides == nullptr || tensor_->shape[i] <= 1) {
      std::uint64_t compact = 1;
      for (std::int32_t inner = i + 1; inner < tensor_->ndim; ++inner)
        compact *= static_cast<std::uint64_t>(tensor_->shape[inner]);
      return compact;
    }
    require(tensor_->strides[i] >= 0, ".strides[" + std::to_string(i) + "] is " + std::to_string(tensor_->strides[i]) +
                                          "; it must not be negative: make a copy in order");
    return static_cast<std::uint64_t>(tensor_->strides[i]);
  }

  void require_dense_rows() const {
    const std::int32_t last = tensor_->ndim - 1;
    const std::uint64_t last_stride = stride(last);
    require(last_stride == 1, ".strides[" + std::to_string(last) + "] is " + std::to_string(last_stride) +
                                  "; elements of a row must lie side by side, with stride 1: make a contiguous copy");
  }

  [[nodiscard]] std::byte* data(DType type) const {
    if (tensor_->data == nullptr) {
      require(tensor_->shape[0] == 0, ".data is null; give it the address of its memory");
      return nullptr;
    }
    const auto base = reinterpret_cast<std::uintptr_t>(tensor_->data);
    require(tensor_->byte_offset <= kMostBytes && bytes(type) < kMostBytes &&
                tensor_->byte_offset + bytes(type) <= std::numeric_limits<std::uintptr_t>::max() - base,
            ".shape and .strides reach further than memory does, from byte_offset " +
                std::to_string(tensor_->byte_offset) + " on; set them to what lies at .data");
    auto* const first = static_cast<std::byte*>(tensor_->data) + tensor_->byte_offset;
    require(reinterpret_cast<std::uintptr_t>(first) % bytes_of(type) == 0,
            ".data with byte_offset " + std::to_string(tensor_->byte_offset) + " is no multiple of its element of " +
                std::to_string(bytes_of(type)) + " bytes; align it");
    return first;
  }

  [[nodiscard]] std::uint32_t size(std::int32_t i) const { return static_cast<std::uint32_t>(tensor_->shape[i]); }

 private:
  /// No process has as much memory, and no sum or product of what is smaller wraps around.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 57;

  /// From the first element to behind the last one; kMostBytes if it is more.
  [[nodiscard]] std::uint64_t bytes(DType type) const {
    std::uint64_t last = 0;  // Elements before the last one.
    for (std::int32_t i = 0; i < tensor_->ndim; ++i) {
      if (tensor_->shape[i] == 0) return 0;
      const auto steps = static_cast<std::uint64_t>(tensor_->shape[i]) - 1;
      const std::uint64_t step = stride(i);
      if (steps != 0 && step > (kMostBytes - last) / steps) return kMostBytes;
      last += steps * step;
    }
    return last >= kMostBytes / bytes_of(type) ? kMostBytes : (last + 1) * bytes_of(type);
  }

  const sluice_tensor* tensor_ = nullptr;
  std::string name_;
};

template <class View>
View view_of(const Checked& tensor, const Place& place) {
  tensor.require_rank(3, "[tokens, heads, head_dim]");
  tensor.require_place(place);
  const DType type = tensor.dtype();
  tensor.require_dense_rows();
  return {.data = tensor.data(type),
          .dtype = type,
          .tokens = tensor.size(0),
          .heads = tensor.size(1),
          .head_dim = tensor.size(2),
          .token_stride = tensor.stride(0),
          .head_stride = tensor.stride(1)};
}

/// Whether no two rows share an element: one of the outer dimensions steps over all of the other.
bool apart(const MutableTensorView& view) {
  const auto over = [&](std::uint64_t inner, std::uint64_t count, std::uint64_t outer, std::uint64_t outer_count) {
    if (count > 1 && inner < view.head_dim) return false;
    const std::uint64_t span = count > 1 ? inner * (count - 1) + view.head_dim : view.head_dim;
    return outer_count <= 1 || outer >= span;
  };
  return over(view.head_stride, view.heads, view.token_stride, view.tokens) ||
         over(view.token_stride, view.tokens, view.head_stride, view.heads);
}

}  // namespace

TensorView readable(const sluice_tensor* tensor, const char* name, const Place& place) {
  return view_of<TensorView>({tensor, name}, place);
}

TensorView values(const sluice_tensor* v, bool latent, const Place& place) {
  return v == nullptr && latent ? TensorView{} : readable(v, "v", place);
}

MutableTensorView writable(const sluice_tensor* tensor, const char* name, const Place& place) {
  const Checked checked(tensor, name);
  const auto view = view_of<MutableTensorView>(checked, place);
  checked.require(apart(view), ".strides are " + std::to_string(view.token_stride) + " and " +
                                   std::to_string(view.head_stride) +
                                   ", so that rows overlap; give it memory of its own for every row");
  return view;
}

float* log_sums(const sluice_tensor* tensor, std::uint32_t rows, std::uint32_t q_heads, const Place& place) {
  if (tensor == nullptr) return nullptr;
  const Checked checked(tensor, "lse");
  checked.require_rank(2, "[rows, q_heads]");
  checked.require_place(place);
  checked.require(checked.dtype() == DType::f32, ".dtype is not f32; log-sums are written as f32 (code 2, 32 bits)");
  const auto text = [](std::uint32_t a, std::uint32_t b) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + "]";
  };
  checked.require(checked.size(0) == rows && checked.size(1) == q_heads,
                  " is " + text(checked.size(0), checked.size(1)) + "; this call needs " + text(rows, q_heads));
  checked.require_dense_rows();
  checked.require(rows <= 1 || checked.stride(0) == q_heads, ".strides[0] is " + std::to_string(checked.stride(0)) +
                                                                 "; log-sums are compact, with stride " +
                                                                 std::to_string(q_heads));
  return reinterpret_cast<float*>(checked.data(DType::f32));
}

}  // namespace sluice::capi
