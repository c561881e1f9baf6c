#include "sluice/options.hpp"

#include <string>

#include "cpu/limits.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& field, const std::string& have, const std::string& want) {
  throw Error(Errc::invalid_argument, field + " is " + have + "; it must be " + want);
}

template <class T>
void require_range(const std::string& field, T value, T low, T high) {
  if (value < low || value > high) {
    refuse(field, std::to_string(value), "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
  }
}

template <class Enum>
std::string number_of(Enum value) {
  return std::to_string(static_cast<unsigned>(value));
}

/// Frames, slots and positions are 32-bit numbers, some of them with a bit to spare.
constexpr std::uint64_t kMost = 0x7fff'ffff;

constexpr bool is_power_of_two(std::uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

void validate(const AttentionShape& shape) {
  require_range<std::uint32_t>("shape.layers", shape.layers, 1, 1024);
  require_range<std::uint32_t>("shape.q_heads", shape.q_heads, 1, 1024);
  require_range<std::uint32_t>("shape.kv_heads", shape.kv_heads, 1, 1024);
  require_range<std::uint32_t>("shape.head_dim", shape.head_dim, 16, 256);
  if (shape.q_heads % shape.kv_heads != 0) {
    refuse("shape.q_heads", std::to_string(shape.q_heads),
           "a multiple of shape.kv_heads (" + std::to_string(shape.kv_heads) + ")");
  }
  if (shape.group() > 32) {
    refuse("shape.q_heads / shape.kv_heads", std::to_string(shape.group()), "at most 32: group members are bits");
  }
  if (shape.head_dim % 16 != 0) refuse("shape.head_dim", std::to_string(shape.head_dim), "a multiple of 16");
}

void validate(const RuntimeOptions& options) {
  validate(options.shape);
  if (!is_valid(options.kv_dtype)) refuse("kv_dtype", number_of(options.kv_dtype), "a value of sluice::DType");
  if (!is_valid(options.placement)) refuse("placement", number_of(options.placement), "a value of sluice::PlacementMode");
  if (!is_power_of_two(options.page_tokens) || options.page_tokens < 8 || options.page_tokens > 256) {
    refuse("page_tokens", std::to_string(options.page_tokens), "a power of two in [8, 256]");
  }
  const std::uint64_t page_bytes = options.layout().page_bytes();
  const std::uint64_t least = page_bytes * options.shape.layers * options.shape.kv_heads;
  if (options.host_bytes < least) {
    refuse("host_bytes", std::to_string(options.host_bytes),
           "at least " + std::to_string(least) + ", one page per layer and KV head");
  }
  if (options.near_bytes != 0 && options.near_bytes < page_bytes) {
    refuse("near_bytes", std::to_string(options.near_bytes), "0 or at least one page (" + std::to_string(page_bytes) + ")");
  }
  const std::uint64_t most_bytes = page_bytes * kMost;
  if (options.host_bytes / page_bytes > kMost) {
    refuse("host_bytes", std::to_string(options.host_bytes), "at most " + std::to_string(most_bytes) + ", 2^31 - 1 pages");
  }
  if (options.near_bytes / page_bytes > kMost) {
    refuse("near_bytes", std::to_string(options.near_bytes), "at most " + std::to_string(most_bytes) + ", 2^31 - 1 pages");
  }
  const std::uint64_t longest = options.host_bytes / least * options.page_tokens;
  if (longest > kMost) {
    refuse("host_bytes", std::to_string(options.host_bytes),
           "less: it holds a sequence of " + std::to_string(longest) + " tokens, and positions end at " +
               std::to_string(kMost));
  }
  require_range<std::uint32_t>("promote_pages", options.promote_pages, 0, 4096);
  require_range<std::uint32_t>("prefill_chunk", options.prefill_chunk, 1, 65536);
  require_range<std::uint32_t>("threads", options.threads, 0, 4096);
  require_range<std::int64_t>("timeout (ms)", options.timeout.count(), 1, 3'600'000);
}

std::uint64_t available_host_bytes() { return cpu::available_memory_bytes(); }

}  // namespace sluice
