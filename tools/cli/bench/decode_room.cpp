#include "tools/cli/bench/decode_room.hpp"

#include <algorithm>
#include <utility>

#include "sluice/units.hpp"

namespace sluice::tools {
namespace {

double mib(std::uint64_t bytes, std::uint32_t sequences) {
  return static_cast<double>(bytes) / static_cast<double>(MiB) / sequences;
}

/// Sequences whose side data fit, with nothing near.
std::uint64_t most_sequences(EngineOptions options, std::uint64_t kv_bytes, Device* device) {
  options.near_bytes = 0;
  const std::uint64_t one = memory_needed(options, device).device();
  const std::uint64_t each = memory_needed(for_sequences(options, 2), device).device() - one;
  return kv_bytes < one ? 0 : 1 + (kv_bytes - one) / std::max<std::uint64_t>(each, 1);
}

}  // namespace

EngineOptions for_sequences(EngineOptions options, std::uint32_t sequences) {
  options.host_bytes *= sequences;
  options.near_bytes *= sequences;
  options.sequences *= sequences;
  options.largest.decode_rows *= sequences;
  options.cpu_sequences *= sequences;
  options.cluster_sequences *= sequences;
  return options;
}

RoomTable::RoomTable() {
  table_ = {.key = "room",
            .title = "Device memory of a sequence, and how many fit with nothing near",
            .columns = {{"length_tokens", "length"},
                        {"batch", "batch"},
                        {"kv_bytes", "KV memory"},
                        {"method", "method"},
                        {"near_mib", "near, MiB", 1},
                        {"codes_mib", "codes", 1},
                        {"digests_mib", "digests", 1},
                        {"buffers_mib", "buffers", 1},
                        {"most_sequences", "fit at most"}},
            .rows = {}};
}

void RoomTable::add(const DecodeBatch& batch, const std::string& method, const EngineOptions& options,
                    const EngineMemoryUse& use, Device* device) {
  const std::uint32_t n = batch.sequences;
  table_.rows.push_back({batch.length, n, batch.kv_bytes == 0 ? Json() : Json(batch.kv_bytes), method,
                         mib(use.near_pages, n), mib(use.codes, n), mib(use.digests, n), mib(use.buffers, n),
                         batch.kv_bytes == 0 ? Json() : Json(most_sequences(options, batch.kv_bytes, device))});
}

void RoomTable::add_dense(const DecodeBatch& batch, std::uint64_t bytes) {
  table_.rows.push_back({batch.length, batch.sequences, batch.kv_bytes == 0 ? Json() : Json(batch.kv_bytes), "dense",
                         mib(bytes, 1), 0.0, 0.0, 0.0, batch.kv_bytes == 0 ? Json() : Json(batch.kv_bytes / bytes)});
}

}  // namespace sluice::tools
