#include "runtime/engine/engine_memory.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "sluice/carver.hpp"
#include "sluice/error.hpp"
#include "sluice/int4.hpp"

namespace sluice::runtime {
namespace {

template <class T>
void take(Carver& parts, T*& part, std::uint64_t count) {
  part = parts.take<T>(count);
}

std::uint64_t heads(const DecodeMemory& m) { return std::uint64_t{m.bucket.rows} * m.shape.q_heads; }
std::uint64_t kv_heads(const DecodeMemory& m) { return std::uint64_t{m.bucket.rows} * m.shape.kv_heads; }

std::uint64_t carve_device(DecodeMemory& m, DecodeMemory& import, std::uint32_t lists, std::uint64_t scratch,
                           std::byte* from) {
  Carver parts(from);
  take(parts, m.state, 1);
  take(parts, m.near_of, m.blocks);
  take(parts, m.lists, std::uint64_t{lists} * m.max_pages);
  take(parts, m.rows, m.bucket.rows);
  take(parts, import.rows, import.bucket.rows);
  take(parts, m.q, heads(m) * m.shape.head_dim);
  take(parts, m.scores, heads(m) * m.bucket.max_tokens);
  take(parts, m.picks, heads(m) * m.bucket.max_picks);
  take(parts, m.near_rows, kv_heads(m) * m.bucket.list_room(m.shape));
  take(parts, m.near_counts, kv_heads(m));
  take(parts, m.near_out, heads(m) * m.shape.head_dim);
  take(parts, m.near_lse, heads(m));
  take(parts, m.scratch, scratch);
  return parts.used();
}

std::uint64_t carve_pinned(DecodeMemory& m, DecodeMemory& import, std::byte* from) {
  Carver parts(from);
  take(parts, m.mailbox, 1);
  take(parts, m.slip, 1);
  take(parts, m.slip_rows, m.bucket.rows);
  take(parts, import.slip_rows, import.bucket.rows);
  // A block joins one list at most before the device knows, and comes or goes once.
  take(parts, m.slip_lists, m.blocks);
  take(parts, m.slip_near, m.blocks);
  take(parts, m.far_q, heads(m) * m.shape.head_dim);
  take(parts, m.far_rows, kv_heads(m) * m.bucket.list_room(m.shape));
  take(parts, m.far_counts, kv_heads(m));
  take(parts, m.far_out, heads(m) * m.shape.head_dim);
  take(parts, m.far_lse, heads(m));
  return parts.used();
}

void require(bool holds, const std::string& field, std::uint64_t have, const std::string& want) {
  if (!holds) throw Error(Errc::invalid_argument, field + " is " + std::to_string(have) + "; it must be " + want);
}

}  // namespace

void validate(const EngineOptions& options) {
  sluice::validate(options.shape);
  const auto in = [](const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    require(value >= low && value <= high, field, value,
            "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
  };
  require(is_valid(options.kv_dtype), "kv_dtype", static_cast<unsigned>(options.kv_dtype), "a value of sluice::DType");
  const std::uint32_t page = options.page_tokens;
  require(page >= 8 && page <= 256 && (page & (page - 1)) == 0, "page_tokens", page, "a power of two in [8, 256]");
  in("rows", options.rows, 1, 1024);
  in("sequences", options.sequences, 1, 65'536);
  in("max_tokens", options.max_tokens, 0, 0x7fff'ffff);
  in("max_picks", options.max_picks, 1, 1u << 20);
  in("max_window", options.max_window, 1, 1u << 20);
  in("import_rows", options.import_rows, 1, 65'536);
  in("threads", options.threads, 0, 4096);
  in("timeout (ms)", static_cast<std::uint64_t>(options.timeout.count()), 1, 3'600'000);
  in("answer_timeout (ms)", static_cast<std::uint64_t>(options.answer_timeout.count()), 1, 60'000);
  const PageLayout layout{.page_tokens = page, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t block = layout.page_bytes() * options.shape.layers * options.shape.kv_heads;
  const std::uint64_t blocks = options.host_bytes / block;
  // Rows of pages are counted in 32 bits, near ones over all planes.
  constexpr std::uint64_t kMostRows = 0x7fff'ffff;
  require(blocks >= 1 && blocks * page <= kMostRows, "host_bytes", options.host_bytes,
          "in [" + std::to_string(block) + ", " + std::to_string(kMostRows / page * block) + "]");
  const std::uint64_t near_pages = options.near_bytes / block * options.shape.layers * options.shape.kv_heads;
  require(near_pages * 2 * page <= kMostRows, "near_bytes", options.near_bytes,
          "at most " + std::to_string(kMostRows / (2 * page) * layout.page_bytes()));
}

EngineMemory::EngineMemory(const EngineOptions& options, Device& device, DecodeVerbs& verbs,
                           const cpu::Topology& topology, std::uint32_t numa_node, const cpu::Workers& workers) {
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t block = layout.page_bytes() * options.shape.layers * options.shape.kv_heads;
  const auto blocks = static_cast<std::uint32_t>(options.host_bytes / block);
  const std::uint32_t longest = blocks * layout.page_tokens;
  const std::uint32_t tokens = options.max_tokens == 0 ? longest : std::min(options.max_tokens, longest);
  decode_.shape = options.shape;
  decode_.layout = layout;
  decode_.blocks = blocks;
  decode_.near_blocks = static_cast<std::uint32_t>(options.near_bytes / block);
  decode_.max_pages = static_cast<std::uint32_t>(div_up(tokens, layout.page_tokens));
  decode_.bucket = {.rows = options.rows,
                    .max_tokens = decode_.max_pages * layout.page_tokens,
                    .max_picks = std::min(options.max_picks, decode_.max_pages * layout.page_tokens),
                    .max_window = options.max_window};
  decode_.answer_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.answer_timeout).count());
  import_ = decode_;
  import_.bucket.rows = options.import_rows;
  far_ = std::make_unique<cpu::HostPool>(
      cpu::HostPoolOptions{.layout = layout, .bytes = blocks * block, .numa_node = numa_node}, topology, workers,
      device);
  decode_.far = far_->base();
  take_device(options, device, verbs);
  take_pinned(options, device);
  // An import shares everything but its rows.
  DecodeRow* const rows = import_.rows;
  DecodeRow* const slip_rows = import_.slip_rows;
  const DecodeBucket bucket = import_.bucket;
  import_ = decode_;
  import_.rows = rows;
  import_.slip_rows = slip_rows;
  import_.bucket = bucket;
  clear(options, device);
}

void EngineMemory::take_device(const EngineOptions& options, Device& device, DecodeVerbs& verbs) {
  const std::uint64_t near_bytes = std::uint64_t{decode_.near_blocks} * decode_.planes() * decode_.layout.page_bytes();
  if (near_bytes != 0) near_ = device.allocate(near_bytes);
  codes_ = device.allocate(std::uint64_t{decode_.blocks} * decode_.planes() * Int4Layout(decode_.layout).page_bytes());
  const std::uint64_t scratch = verbs.scratch_bytes(decode_);
  device_ = device.allocate(carve_device(decode_, import_, options.sequences, scratch, nullptr));
  (void)carve_device(decode_, import_, options.sequences, scratch, device_->data());
  decode_.near = near_ ? near_->data() : device_->data();
  decode_.codes = codes_->data();
}

void EngineMemory::take_pinned(const EngineOptions&, Device& device) {
  pinned_ = device.allocate_pinned(carve_pinned(decode_, import_, nullptr));
  (void)carve_pinned(decode_, import_, pinned_->data());
}

void EngineMemory::clear(const EngineOptions& options, Device& device) {
  constexpr std::uint64_t kPiece = 4 * MiB;
  const auto stream = device.create_stream("clear");
  const auto source = device.allocate_pinned(kPiece);
  const auto fill = [&](std::byte* to, std::uint64_t bytes) {
    for (std::uint64_t at = 0; at < bytes; at += kPiece) {
      const Copy copy{.to = to + at, .from = source->data(), .bytes = std::min(kPiece, bytes - at)};
      stream->copy({&copy, 1});
    }
    stream->synchronize(deadline_after(options.timeout));
  };
  fill(device_->data(), device_->bytes());
  // Pages are read up to the last token alone, but vector loads of their neighbours must find numbers.
  fill(codes_->data(), codes_->bytes());
  if (near_) fill(near_->data(), near_->bytes());
  std::memset(source->data(), 0xff, kPiece);
  static_assert(kNone == 0xffff'ffffu);
  fill(reinterpret_cast<std::byte*>(decode_.near_of), decode_.blocks * sizeof(std::uint32_t));
}

}  // namespace sluice::runtime
