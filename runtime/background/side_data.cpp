#include "runtime/background/side_data.hpp"

#include <algorithm>

#include "cpu/backend/verbs.hpp"
#include "sluice/error.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::runtime {

SideData::SideData(const ForwardMemory& memory, Device& device, std::chrono::milliseconds timeout)
    : memory_(memory),
      backend_(device.backend()),
      timeout_(timeout),
      key_mean_(device.allocate_pinned(memory.shape.head_dim * sizeof(float))),
      stream_(device.create_stream("side data")) {}

void SideData::make(std::uint32_t plane, std::span<const std::uint32_t> blocks, std::uint32_t tokens,
                    std::uint32_t first) {
  wait();
  copies_.clear();
  digests_.clear();
  const std::uint32_t page_tokens = memory_.layout.page_tokens;
  const std::uint64_t copy_bytes = memory_.code_page_bytes();
  float* const mean = first == kNone ? nullptr : reinterpret_cast<float*>(key_mean_->data());
  if (mean != nullptr)
    cpu::key_mean(cpu::fastest_kernels(), memory_.far_layout, memory_.far_block(plane, first), mean);
  for (std::uint32_t begin = 0, i = 0; begin < tokens; begin += page_tokens, ++i) {
    const std::uint64_t page = memory_.far_page(plane, blocks[i]);
    const std::uint32_t rows = std::min(page_tokens, tokens - begin);
    const std::byte* const far = memory_.far_block(plane, blocks[i]);
    if (memory_.has_codes())
      copies_.push_back({.page = far,
                         .rows = rows,
                         .out = memory_.codes + page * copy_bytes,
                         .mean = mean,
                         .bits = memory_.code_bits});
    if (memory_.digests != nullptr && rows == page_tokens)
      digests_.push_back({.page = far, .out = memory_.digest_of(plane, blocks[i])});
  }
  backend_.make_codes(copies_, memory_.far_layout, stream_.get());
  backend_.digest(digests_, memory_.digest, memory_.far_layout, stream_.get());
}

void SideData::wait() { stream_->synchronize(deadline_after(timeout_)); }

bool SideData::idle() noexcept {
  try {
    stream_->synchronize(deadline_after(std::chrono::milliseconds(0)));
  } catch (const Error& error) {
    return error.code() != Errc::timeout;  // What has failed does not run.
  } catch (...) {
    return false;
  }
  return true;
}

}  // namespace sluice::runtime
