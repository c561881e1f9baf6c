#include "gpu/device/driver.hpp"

#include <algorithm>
#include <array>

#include "gpu/device/cuda_error.hpp"

namespace sluice::gpu {
namespace {

/// `version` is the oldest CUDA whose form of the function is the one in our header.
template <class Function>
Function entry_point(const char* name, unsigned version) noexcept {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (status != cudaSuccess) (void)cudaGetLastError();
  const bool usable = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<Function>(found) : nullptr;
}

/// Both number their errors alike, as far as they share them.
cudaError_t runtime_error(CUresult result) noexcept { return static_cast<cudaError_t>(result); }

CUdeviceptr address(const std::uint64_t* word) noexcept { return reinterpret_cast<CUdeviceptr>(word); }

}  // namespace

Driver::Driver() noexcept
    : write_value_(entry_point<WriteValue>("cuStreamWriteValue64", 11070)),
      wait_value_(entry_point<WaitValue>("cuStreamWaitValue64", 11070)),
      batch_operations_(entry_point<BatchOperations>("cuStreamBatchMemOp", 11070)),
      get_attribute_(entry_point<GetAttribute>("cuDeviceGetAttribute", 2000)),
      encode_tiled_(entry_point<EncodeTiled>("cuTensorMapEncodeTiled", 12000)) {}

const Driver& Driver::instance() {
  static const Driver driver;
  return driver;
}

bool Driver::has_memory_operations(int ordinal) const noexcept {
  if (write_value_ == nullptr || wait_value_ == nullptr || batch_operations_ == nullptr || get_attribute_ == nullptr)
    return false;
  int able = 0;
  // A CUdevice is the ordinal.
  const CUresult result = get_attribute_(&able, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, ordinal);
  return result == CUDA_SUCCESS && able != 0;
}

cudaError_t Driver::write(cudaStream_t stream, std::uint64_t* word, std::uint64_t value) const noexcept {
  return runtime_error(write_value_(stream, address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

cudaError_t Driver::wait_for_bits(cudaStream_t stream, const std::uint64_t* word, std::uint64_t bits) const noexcept {
  return runtime_error(wait_value_(stream, address(word), bits, CU_STREAM_WAIT_VALUE_AND));
}

cudaError_t Driver::arrive_and_wait(cudaStream_t stream, std::uint64_t* arrived, std::uint64_t ticket,
                                    const std::uint64_t* word, std::uint64_t value) const noexcept {
  // One call for both. Batches refuse writes without their barrier (seen with driver 580).
  std::array<CUstreamBatchMemOpParams, 2> operations{};
  operations[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  operations[0].writeValue.address = address(arrived);
  operations[0].writeValue.value64 = ticket;
  operations[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  operations[1].waitValue.address = address(word);
  operations[1].waitValue.value64 = value;
  operations[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  return runtime_error(batch_operations_(stream, 2, operations.data(), 0));
}

cudaError_t Driver::map_tensor(CUtensorMap& map, const TensorBoxes& tensor) const noexcept {
  constexpr std::array<cuuint32_t, 4> kEvery{1, 1, 1, 1};
  // Copied as bits, so the type has only to have the size.
  return runtime_error(encode_tiled_(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, tensor.base, tensor.sizes.data(),
                                     tensor.strides.data(), tensor.box.data(), kEvery.data(),
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

CUtensorMap map_pages(const KvView& kv, std::uint32_t rows, std::uint64_t frames) {
  const PageLayout& layout = kv.layout;
  CUtensorMap map{};
  check(Driver::instance().map_tensor(
            map, {.base = kv.base,
                  .sizes = {layout.head_dim, layout.page_tokens, 2, std::max<std::uint64_t>(frames, 1)},
                  .strides = {layout.row_bytes(), layout.half_bytes(), layout.page_bytes()},
                  .box = {64, std::min(layout.page_tokens, rows), 1, 1}}),
        "describe pages to the copy engine");
  return map;
}

}  // namespace sluice::gpu
