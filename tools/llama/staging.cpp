#include "tools/llama/staging.hpp"

#include <algorithm>
#include <cstring>

namespace sluice::tools {

Staging::Staging(Device& device, Stream& stream, std::chrono::milliseconds timeout)
    : stream_(stream), timeout_(timeout), pinned_(device.allocate_pinned(kPieceBytes)) {}

void Staging::copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  const Copy one{.to = to, .from = from, .bytes = bytes};
  stream_.copy({&one, 1});
  stream_.synchronize(deadline_after(timeout_));
}

void Staging::to_device(std::byte* to, std::uint64_t bytes, const Fill& fill) {
  for (std::uint64_t done = 0; done < bytes; done += kPieceBytes) {
    const std::uint64_t count = std::min(kPieceBytes, bytes - done);
    fill({pinned_->data(), count}, done);
    copy(to + done, pinned_->data(), count);
  }
}

void Staging::to_host(const std::byte* from, std::uint64_t bytes, const Drain& drain) {
  for (std::uint64_t done = 0; done < bytes; done += kPieceBytes) {
    const std::uint64_t count = std::min(kPieceBytes, bytes - done);
    copy(pinned_->data(), from + done, count);
    drain({pinned_->data(), count}, done);
  }
}

TensorCourier::TensorCourier(Device& device, Stream& stream, std::chrono::milliseconds timeout)
    : device_(device), staging_(device, stream, timeout) {}

TensorView TensorCourier::to_device(Slot slot, const TensorView& dense) {
  TensorView moved = dense;
  if (dense.tokens == 0) return moved;
  const std::uint64_t bytes = dense.tokens * dense.token_stride * bytes_of(dense.dtype);
  auto& near = near_[slot];
  if (!near || near->bytes() < bytes) {
    near.reset();  // before the new one is asked for
    near = device_.allocate(bytes);
  }
  staging_.to_device(near->data(), bytes, [&](std::span<std::byte> piece, std::uint64_t offset) {
    std::memcpy(piece.data(), dense.data + offset, piece.size());
  });
  moved.data = near->data();
  return moved;
}

TensorView TensorCourier::to_host(Slot slot, const TensorView& view) {
  TensorView moved = view;
  if (view.tokens == 0) return moved;
  // From the first element to the last, with whatever lies between the rows.
  const std::byte* end = view.row(view.tokens - 1, view.heads - 1) + view.head_dim * bytes_of(view.dtype);
  const auto bytes = static_cast<std::uint64_t>(end - view.data);
  std::vector<std::byte>& far = far_[slot];
  if (far.size() < bytes) far.resize(bytes);
  staging_.to_host(view.data, bytes, [&](std::span<const std::byte> piece, std::uint64_t offset) {
    std::memcpy(far.data() + offset, piece.data(), piece.size());
  });
  moved.data = far.data();
  return moved;
}

}  // namespace sluice::tools
