#include "runtime/engine/engine_memory.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <string>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/memory_parts.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::runtime {
namespace {

std::uint64_t block_bytes_of(const ForwardMemory& memory) { return memory.far_layout.page_bytes() * memory.planes(); }
/// As many near pages, one of each plane.
std::uint64_t near_bytes_of(const ForwardMemory& memory, std::uint64_t pages) {
  return pages * memory.layout.page_bytes() * memory.planes();
}

/// What rows attend without choosing: windows of layers, and contexts that are short.
void describe_windows(ForwardMemory& memory, const EngineOptions& options) {
  if (!options.windows.empty()) memory.windows = options.windows.data();
  for (const std::uint32_t window : options.windows)
    memory.widest = std::max(memory.widest, std::min(window, memory.largest.max_tokens));
  if (options.dense_tokens != kDenseAuto)
    memory.dense_tokens = std::min(options.dense_tokens, memory.largest.max_tokens);
  memory.widest = std::max(memory.widest, memory.dense_tokens);
}

/// Who reads what is far, and what policies that choose on the CPU need for it.
void describe_far(ForwardMemory& memory, const EngineOptions& options, const EngineSizes& sizes) {
  const bool streams = options.placement == PlacementMode::stream;
  memory.fetch_share = streams ? kWholeFetchShare : fetch_share_of(std::max(0.f, options.fetch_share));
  memory.fetch_lists = streams ? 0 : options.fetch_lists;
  memory.tail_rows = sizes.cpu_sequences * sizes.prompt_queries;
  memory.fetches_chosen = streams && memory.tail_rows != 0;
  memory.handover = options.handover;
  if (memory.handover == Handover::device)
    memory.answer_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.answer_timeout).count());
  // The device waits for them in its kernels; threads count what they have to propose for a forward in 20 bits.
  const bool counted = std::uint64_t{memory.largest.decode_rows} * memory.layer_heads() < std::uint64_t{1} << 20;
  if (sizes.forecasts && counted && memory.handover == Handover::device && memory.largest.top_k)
    memory.proposal_slots = sizes.cpu_sequences;
}

/// Sizes, and no memory yet.
ForwardMemory described(const EngineOptions& options, const EngineSizes& sizes, const scheduler::LayerStacks& stacks) {
  ForwardMemory memory;
  memory.stacks = stacks.count();
  memory.stack_layers = stacks.layers();
  memory.last_layers = options.shape.layers - (stacks.count() - 1) * stacks.layers();
  memory.list_count = options.sequences;
  memory.places = stacks.places();
  memory.shape = attended_shape(options.shape);
  memory.shape.scale = options.scale;
  memory.shape.softcap = options.softcap;
  memory.far_layout = far_layout(options);
  memory.layout = memory.far_layout.near();
  memory.blocks = static_cast<std::uint32_t>(options.host_bytes / block_bytes_of(memory));
  memory.near_pages = static_cast<std::uint32_t>(options.near_bytes / near_bytes_of(memory, 1));
  memory.promotions = memory.near_pages == 0 ? 0 : options.promotions;
  memory.largest = memory.bucket = options.largest;
  memory.max_pages = memory.largest.max_tokens / memory.layout.page_tokens;
  memory.append_rows = std::max(memory.largest.rows(), options.import_rows);
  memory.max_picks = std::min(sizes.max_picks, memory.largest.max_tokens);
  memory.max_ranked = std::min(sizes.max_ranked, memory.max_pages);
  memory.page_shift = static_cast<std::uint32_t>(std::countr_zero(options.page_tokens));
  memory.code_bits = sizes.code_bits;
  memory.digest = sizes.digests.value_or(DigestKind::box);
  memory.max_window = sizes.max_window;
  // What is chosen of them is a share of the mass.
  memory.cluster_slots = memory.largest.unbounded ? sizes.cluster_sequences : 0;
  memory.max_clusters = std::min(sizes.max_clusters, memory.largest.max_tokens);
  describe_windows(memory, options);
  memory.sparse_prefill = options.prefill.mode != PrefillMode::full && memory.largest.prefills != 0;
  memory.prefill = options.prefill;
  const std::uint32_t longest = memory.max_pages * memory.layout.page_tokens;
  memory.prefill_window = memory.sparse_prefill ? longest : std::min(options.prefill_window, longest);
  describe_far(memory, options, sizes);
  return memory;
}

/// Entries of lists of blocks that a slip has room for.
std::uint64_t listed_blocks(const EngineOptions& options, const ForwardMemory& memory) {
  return std::uint64_t{std::min(options.sequences, memory.append_rows)} * memory.stacks * memory.max_pages;
}

std::uint64_t codes_bytes_of(const ForwardMemory& memory) {
  return std::uint64_t{memory.blocks} * memory.planes() * memory.code_page_bytes();
}
std::uint64_t digests_bytes_of(const ForwardMemory& memory) {
  return std::uint64_t{memory.blocks} * memory.planes() * 2 * memory.layout.row_bytes();
}

}  // namespace

EngineMemoryUse EngineMemory::needed(const EngineOptions& options, const EngineSizes& sizes,
                                     const ForwardVerbs* verbs) {
  const scheduler::LayerStacks stacks(options);
  ForwardMemory memory = described(options, sizes, stacks);
  const std::uint64_t scratch = verbs == nullptr ? 0 : verbs->scratch_bytes(memory);
  std::vector<ForwardMemory> slips(options.in_flight, memory);
  return {
      .far_pages = memory.blocks * block_bytes_of(memory),
      .pinned = carve_pinned(slips, listed_blocks(options, memory), nullptr),
      .near_pages = near_bytes_of(memory, memory.near_pages),
      .codes = codes_bytes_of(memory),
      .digests = sizes.digests ? digests_bytes_of(memory) : 0,
      .buffers = carve_device(memory, scratch, nullptr)};
}

EngineMemory::EngineMemory(const EngineOptions& options, const EngineSizes& sizes, Device& device, ForwardVerbs& verbs,
                           const cpu::Topology& topology, std::uint32_t numa_node)
    : stacks_(options) {
  ForwardMemory memory = described(options, sizes, stacks_);
  cpu::WorkersOptions workers = cpu::touching(topology, numa_node);
  workers.pin = options.pin_threads;
  far_ = std::make_unique<cpu::HostPool>(
      cpu::HostPoolOptions{
          .layout = memory.far_layout, .bytes = memory.blocks * block_bytes_of(memory), .numa_node = numa_node},
      topology, cpu::Workers(topology, workers), device);
  memory.far = far_->base();
  take_device(sizes, memory, device, verbs);
  take_pinned(options, memory, device);
  clear(options, device);
}

void EngineMemory::take_device(const EngineSizes& sizes, ForwardMemory& memory, Device& device, ForwardVerbs& verbs) {
  if (memory.near_pages != 0) near_ = device.allocate(near_bytes_of(memory, memory.near_pages));
  if (memory.has_codes()) codes_ = device.allocate(codes_bytes_of(memory));
  if (sizes.digests) digests_ = device.allocate(digests_bytes_of(memory));
  const std::uint64_t scratch = verbs.scratch_bytes(memory);
  device_ = device.allocate(carve_device(memory, scratch, nullptr));
  (void)carve_device(memory, scratch, device_->data());
  memory.near = near_ ? near_->data() : device_->data();
  if (codes_) memory.codes = codes_->data();
  if (digests_) memory.digests = digests_->data();
}

void EngineMemory::take_pinned(const EngineOptions& options, const ForwardMemory& memory, Device& device) {
  copies_ = 2 * options.sequences * memory.stacks;
  slips_.assign(options.in_flight, memory);
  std::vector<ForwardMemory> counted = slips_;
  const std::uint64_t listed = listed_blocks(options, memory);
  pinned_ = device.allocate_pinned(carve_pinned(counted, listed, nullptr));
  (void)carve_pinned(slips_, listed, pinned_->data());
  *largest().mailbox = {};
  const ForwardMemory& m = largest();
  std::fill_n(m.proposals, m.proposal_layer(m.proposal_slots, 0) * m.shape.kv_heads, ForwardProposal{});
}

void EngineMemory::copy_rows(std::uint32_t block, std::uint32_t copy, std::uint32_t tokens) const noexcept {
  const ForwardMemory& m = largest();
  const PageLayout& layout = m.far_layout;
  for (std::uint32_t plane = 0; plane < m.planes(); ++plane) {
    const std::byte* const from = m.far_block(plane, block);
    std::byte* const to = m.far_block(plane, copy);
    std::memcpy(to, from, tokens * layout.row_bytes());
    if (!layout.latent)
      std::memcpy(to + layout.half_bytes(), from + layout.half_bytes(), tokens * layout.row_bytes());
    std::memcpy(to + layout.scales_offset(), from + layout.scales_offset(), tokens * layout.scale_bytes());
  }
}

EngineMemoryUse EngineMemory::use() const noexcept {
  return {.far_pages = largest().blocks * block_bytes(),
          .pinned = pinned_->bytes(),
          .near_pages = near_ ? near_->bytes() : 0,
          .codes = codes_ ? codes_->bytes() : 0,
          .digests = digests_ ? digests_->bytes() : 0,
          .buffers = device_->bytes()};
}

void EngineMemory::clear(const EngineOptions& options, Device& device) {
  const auto stream = device.create_stream("clear");
  // Each has the time-out to itself: on the host device near memory may take seconds.
  const auto fill = [&](std::span<std::byte> memory, std::byte value) {
    stream->fill(memory, value);
    stream->synchronize(deadline_after(options.timeout));
  };
  const auto clear_all = [&](const std::unique_ptr<Buffer>& buffer) {
    if (buffer) fill({buffer->data(), buffer->bytes()}, std::byte{0});
  };
  clear_all(device_);
  // Pages are read up to the last token alone, but vector loads of their neighbours must find numbers.
  clear_all(codes_);
  clear_all(digests_);
  clear_all(near_);
  static_assert(kNone == 0xffff'ffffu);
  const ForwardMemory& m = largest();
  const std::uint64_t rows = m.near_row(m.planes(), 0) * sizeof(ForwardNearRow);
  fill({reinterpret_cast<std::byte*>(m.near_rows), rows}, std::byte{0xff});
}

}  // namespace sluice::runtime
