#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/page_table.hpp"
#include "runtime/transfer_engine.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/prefill_auto.hpp"
#include "sluice/audit.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "sluice/stats.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// One layer of one sequence. `heads` is sized when the sequence begins and never moves.
struct LayerState {
  std::uint32_t tokens = 0;      ///< of finished calls
  std::vector<HeadPages> heads;  ///< [kv_heads]

  std::unique_ptr<scheduler::LayerPolicy> policy;  ///< null until a complete prompt or the first step after it
  bool decoding = false;                           ///< a step has begun since the last prompt
  std::vector<std::vector<scheduler::HotPage>> hot;  ///< [kv_heads] the forecast's pages, hottest first

  std::unique_ptr<Buffer> frame_table;   ///< device, [kv_heads, frame_table_pages]; null unless pages are ranked
  std::uint32_t frame_table_pages = 0;   ///< room per KV head
  std::uint32_t copied_pages = 0;        ///< pages [0, copied_pages) have 4-bit copies, see Int4Index
  std::uint32_t mirrored_pages = 0;      ///< and these have them on the device
  std::uint32_t indexed_pages = 0;       ///< pages [0, indexed_pages) have their frame on the device
  std::uint32_t digested_pages = 0;      ///< and these their digests

  /// Queries of the last prompt tokens, newest last: [last_q_rows, q_heads, head_dim].
  std::vector<float> last_q;
  std::uint32_t last_q_rows = 0;
  std::uint32_t last_q_end = 0;  ///< position behind the newest of them

  std::unique_ptr<Event> flushed;     ///< the prompt's newest chunk is in the host pool
  std::uint32_t prefill_rest = 0;     ///< see PrefillBets

  std::vector<Transfer> arriving;  ///< promotions in flight, oldest first

  [[nodiscard]] std::uint32_t pages() const noexcept { return heads.front().pages(); }
};

/// What audits found out about a sequence.
struct AuditBook {
  /// Of one (layer, KV head).
  struct Values {
    std::uint32_t seen = 0;  ///< tokens [0, seen) were looked at
    double largest = 0.0;    ///< norm
  };
  AuditReport report;
  std::vector<Values> values;          ///< [layers, kv_heads]; empty until the first audit
  std::vector<std::uint32_t> watched;  ///< ascending, see Runtime::watch
};

struct Sequence {
  SequenceId id;
  PolicySpec spec;
  PrefillSpec prefill;
  scheduler::PrefillBets bets;
  std::vector<LayerState> layers;
  Stats stats;
  AuditBook audit;
  std::string lost;  ///< why a call that had returned came to nothing, so that the sequence can only be ended; or empty
};

}  // namespace sluice::runtime
