#include "runtime/background/side_data.hpp"

#include <algorithm>

#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

SideData::SideData(const ForwardMemory& memory, Device& device, ForwardVerbs& verbs, std::chrono::milliseconds timeout)
    : memory_(memory),
      verbs_(verbs),
      timeout_(timeout),
      key_mean_(device.allocate_pinned(memory.shape.head_dim * sizeof(float))),
      pages_(device.allocate_pinned(memory.max_pages * sizeof(FarPage))),
      stream_(device.create_stream("side data")) {}

void SideData::make(std::uint32_t plane, std::span<const std::uint32_t> blocks, std::uint32_t tokens,
                    std::uint32_t first) {
  wait();
  const std::uint32_t page_tokens = memory_.layout.page_tokens;
  float* const mean = first == kNone ? nullptr : reinterpret_cast<float*>(key_mean_->data());
  if (mean != nullptr)
    cpu::key_mean(cpu::fastest_kernels(), memory_.far_layout, memory_.far_block(plane, first), mean);
  const std::span pages(reinterpret_cast<FarPage*>(pages_->data()), div_up(tokens, page_tokens));
  for (std::uint32_t i = 0; i < pages.size(); ++i)
    pages[i] = {.block = blocks[i], .rows = std::min(page_tokens, tokens - i * page_tokens)};
  void* const queue = stream_->native_handle();  // Of the embedded device it is null.
  verbs_.derive(memory_, plane, pages, mean, queue != nullptr ? queue : stream_.get());
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
