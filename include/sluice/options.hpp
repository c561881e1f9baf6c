#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sluice/page.hpp"
#include "sluice/plan.hpp"
#include "sluice/shape.hpp"
#include "sluice/units.hpp"

namespace sluice {

class TraceSink;

/// Everything that is fixed when a Runtime is built.
struct RuntimeOptions {
  /// Attention shape of the model. Required.
  AttentionShape shape;

  /// Tokens per page: the unit of promotion, eviction and page selection. Larger pages use the link
  /// better, smaller ones select more sharply. PolicySpec::page_tokens says what a policy was made for.
  /// Power of two in [8, 256].
  std::uint32_t page_tokens = 16;

  /// Element type of keys and values in both pools. f32 is for golden tests; it doubles every byte count.
  DType kv_dtype = DType::bf16;

  /// Host memory for all pages, in bytes. Reserved and touched at construction, never grown.
  /// A sequence of n tokens takes layers * kv_heads * ceil(n / page_tokens) pages.
  std::uint64_t host_bytes = 1 * GiB;

  /// Device memory for near pages, in bytes. 0: a quarter of host_bytes. At least the pages that must
  /// be near (open page, sinks, recent window) have to fit for every live sequence; `begin` checks.
  std::uint64_t near_bytes = 0;

  /// Who attends what is selected but not near.
  PlacementMode placement = PlacementMode::hybrid;

  /// Pages that a forecast may promote per (sequence, layer) and step. Larger follows the history faster
  /// and uses more of the link; 0 leaves the near set to fetches. [0, 4096]
  std::uint32_t promote_pages = 8;

  /// Prompt tokens per call of `prefill`; sizes the staging memory on the device. [1, 65536]
  std::uint32_t prefill_chunk = 512;

  /// Worker threads, the caller's included. 0: one per physical core that this process may use.
  std::uint32_t threads = 0;

  /// The cores that workers run on, by the OS index of a PU of each. Empty: those that this process may use or, where
  /// a launcher started several processes (LOCAL_RANK of LOCAL_WORLD_SIZE) without binding them, its equal part of
  /// them.
  std::vector<std::uint32_t> cores{};

  /// Bind workers to cores and the host pool to a NUMA node. Off on machines that others pin.
  bool pin_threads = true;

  /// NUMA node of the host pool and of the cores that workers take first. Empty: the node nearest to the device, or the
  /// first where the machine does not say, as in many virtual machines.
  std::optional<std::uint32_t> numa_node;

  /// Every wait of one call gives up after this long and throws Error{Errc::timeout}. [1 ms, 1 h]
  std::chrono::milliseconds timeout{30'000};

  /// Every N-th decode step also computes exact attention and reports coverage. Costs a dense pass; 0 = never.
  std::uint32_t audit_every = 0;

  /// Receives every node that runs; null: none. Must outlive the runtime.
  TraceSink* trace = nullptr;

  [[nodiscard]] PageLayout layout() const noexcept {
    return {.page_tokens = page_tokens, .head_dim = shape.head_dim, .dtype = kv_dtype};
  }
};

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const RuntimeOptions& options);

/// Host memory that this process can still take before the kernel reclaims or kills, its control groups' limits
/// included. Read anew at every call; the largest number if nothing limits it.
[[nodiscard]] std::uint64_t available_host_bytes();

}  // namespace sluice
