#include "runtime/int4_index.hpp"

#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

Int4Index::Int4Index(Device& device, cpu::Backend& host, const cpu::HostPool& pool, TransferEngine& link)
    : device_(device), host_(host), pool_(pool), link_(link), layout_(pool.layout()) {
  for (auto& event : landed_) event = device.create_event();
}

void Int4Index::reserve(bool mirrored) {
  const std::uint64_t bytes = pool_.frames() * layout_.page_bytes();
  if (!copies_) copies_ = device_.allocate_pinned(bytes);
  if (mirrored && !mirror_) mirror_ = device_.allocate(bytes);
}

void Int4Index::update(LayerState& layer, std::uint32_t pages) {
  if (layer.copied_pages >= pages) return;
  tasks_.clear();
  for (const HeadPages& head : layer.heads) {
    for (std::uint32_t page = layer.copied_pages; page < pages; ++page) {
      const std::uint32_t frame = head.frames[page];
      tasks_.push_back({.page = pool_.frame(frame),
                        .rows = layout_.page_tokens,
                        .out = copies_->data() + frame * layout_.page_bytes()});
    }
  }
  host_.quantize(tasks_, pool_.layout(), nullptr);
  layer.copied_pages = pages;
}

void Int4Index::mirror(const LayerState& layer, std::uint32_t pages, Stream& reader, Deadline deadline) {
  if (layer.mirrored_pages >= pages) return;
  sent_.clear();
  for (const HeadPages& head : layer.heads) {
    for (std::uint32_t page = layer.mirrored_pages; page < pages; ++page) {
      const std::uint64_t at = head.frames[page] * layout_.page_bytes();
      std::byte* const to = mirror_->data() + at;
      if (!sent_.empty() && sent_.back().to + sent_.back().bytes == to) {
        sent_.back().bytes += layout_.page_bytes();
      } else {
        sent_.push_back({.to = to, .from = copies_->data() + at, .bytes = layout_.page_bytes()});
      }
    }
  }
  Event& landed = take_event(deadline);
  link_.copy(sent_);
  link_.stream().record(landed);
  reader.wait(landed);
}

Event& Int4Index::take_event(Deadline deadline) {
  event_ = (event_ + 1) % landed_.size();
  Event& event = *landed_[event_];
  if (!wait_until([&] { return event.state() != Event::State::pending; }, deadline)) {
    throw Error(Errc::timeout, "4-bit copies of keys did not reach the device in time; raise the timeout");
  }
  return event;
}

}  // namespace sluice::runtime
