#include "runtime/page_index.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

/// Entries beyond the pages that exist, so that decoding rarely has to move a table.
constexpr std::uint32_t kRoom = 64;

}  // namespace

PageIndex::PageIndex(Device& device, cpu::Backend& host, const cpu::HostPool& pool, TransferEngine& link)
    : device_(device), host_(host), pool_(pool), link_(link) {
  for (Half& half : halves_) half.landed = device.create_event();
}

void PageIndex::reserve(bool digests) {
  if (!pinned_) pinned_ = device_.allocate_pinned(2 * kHalfBytes);
  if (digests && !digests_) digests_ = device_.allocate(2 * pool_.layout().row_bytes() * pool_.frames());
}

const std::uint32_t* PageIndex::frames(const LayerState& layer, std::uint32_t kv_head) noexcept {
  return reinterpret_cast<const std::uint32_t*>(layer.frame_table->data()) +
         std::size_t{kv_head} * layer.frame_table_pages;
}

void PageIndex::update(LayerState& layer, std::optional<DigestKind> kind, std::uint32_t pages, Stream& reader, Deadline deadline) {
  if (layer.frame_table_pages < pages) {
    grow_table(layer, pages, deadline);
  } else if (layer.indexed_pages < pages) {
    send_frames(layer, layer.indexed_pages, pages, &reader, deadline);
  }
  if (kind && layer.digested_pages < pages) send_digests(layer, *kind, layer.digested_pages, pages, reader, deadline);
}

void PageIndex::grow_table(LayerState& layer, std::uint32_t pages, Deadline deadline) {
  const std::uint32_t room = pages + pages / 4 + kRoom;
  if (std::uint64_t{room} * sizeof(std::uint32_t) > kHalfBytes) {
    throw Error(Errc::out_of_capacity, "a sequence of " + std::to_string(pages) +
                                           " pages is longer than page ranking supports; use larger pages");
  }
  auto table = device_.allocate(std::uint64_t{room} * layer.heads.size() * sizeof(std::uint32_t));
  std::swap(table, layer.frame_table);
  layer.frame_table_pages = room;
  layer.indexed_pages = 0;
  try {
    send_frames(layer, 0, room, nullptr, deadline);
  } catch (...) {
    layer.frame_table_pages = 0;  // Filled anew by the next call.
    throw;
  }
}

void PageIndex::send_frames(const LayerState& layer, std::uint32_t begin, std::uint32_t end, Stream* reader,
                            Deadline deadline) {
  const std::uint64_t bytes = std::uint64_t{end - begin} * sizeof(std::uint32_t);
  for (std::size_t kv = 0; kv < layer.heads.size();) {
    std::byte* at = take_half(deadline);
    const std::byte* const stop = at + kHalfBytes;
    copies_.clear();
    for (; kv < layer.heads.size() && at + bytes <= stop; ++kv, at += bytes) {
      const std::vector<std::uint32_t>& frames = layer.heads[kv].frames;
      const std::uint64_t known = std::min<std::uint64_t>(end, frames.size()) - begin;
      std::memcpy(at, frames.data() + begin, known * sizeof(std::uint32_t));
      std::memset(at + known * sizeof(std::uint32_t), 0, bytes - known * sizeof(std::uint32_t));
      const std::uint64_t to = (kv * layer.frame_table_pages + begin) * sizeof(std::uint32_t);
      copies_.push_back({.to = layer.frame_table->data() + to, .from = at, .bytes = bytes});
    }
    send(copies_, reader, deadline);
  }
}

void PageIndex::send_digests(const LayerState& layer, DigestKind kind, std::uint32_t begin, std::uint32_t end,
                             Stream& reader, Deadline deadline) {
  const std::uint64_t digest_bytes = 2 * pool_.layout().row_bytes();
  const std::uint64_t room = kHalfBytes / digest_bytes;
  const std::uint64_t total = std::uint64_t{end - begin} * layer.heads.size();
  for (std::uint64_t done = 0; done < total;) {
    const std::uint64_t count = std::min(room, total - done);
    std::byte* const half = take_half(deadline);
    tasks_.clear();
    copies_.clear();
    for (std::uint64_t i = 0; i < count; ++i, ++done) {
      const std::uint32_t frame = layer.heads[done / (end - begin)].frames[begin + done % (end - begin)];
      std::byte* const out = half + i * digest_bytes;
      std::byte* const to = digests_->data() + frame * digest_bytes;
      tasks_.push_back({.page = pool_.frame(frame), .out = out});
      if (!copies_.empty() && copies_.back().to + copies_.back().bytes == to) {
        copies_.back().bytes += digest_bytes;
      } else {
        copies_.push_back({.to = to, .from = out, .bytes = digest_bytes});
      }
    }
    host_.digest(tasks_, kind, pool_.layout(), nullptr);
    send(copies_, &reader, deadline);
  }
}

std::byte* PageIndex::take_half(Deadline deadline) {
  half_ ^= 1;
  const Half& half = halves_[half_];
  if (half.used && !wait_until([&] { return half.landed->state() != Event::State::pending; }, deadline)) {
    throw Error(Errc::timeout, "page digests did not reach the device in time; raise the timeout");
  }
  return pinned_->data() + half_ * kHalfBytes;
}

void PageIndex::send(std::span<const Copy> copies, Stream* reader, Deadline deadline) {
  Half& half = halves_[half_];
  link_.copy(copies);
  half.used = true;
  link_.stream().record(*half.landed);
  if (reader != nullptr) {
    reader->wait(*half.landed);
    return;
  }
  if (!wait_until([&] { return half.landed->state() != Event::State::pending; }, deadline)) {
    throw Error(Errc::timeout, "a table of pages did not reach the device in time; raise the timeout");
  }
  if (half.landed->state() == Event::State::failed) {
    throw Error(Errc::device, "a table of pages could not be copied to the device: " + half.landed->reason() +
                                  "; the step may be repeated");
  }
}

}  // namespace sluice::runtime
