#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "runtime/background/audit_group.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// What a policy chose on the CPU in a layer, for one KV head's group.
struct ChoiceNote {
  std::vector<std::uint32_t> rows;  ///< as ForwardMemory::far_rows, without what the device had listed
  std::vector<std::uint32_t>
      members;                 ///< [rows] bit h: query head h attends it; empty: all but those that are bypassed
  std::uint32_t bypassed = 0;  ///< bit h: query head h attends none of them
};

/// A row of an audited forward that chooses.
struct AuditedRow {
  SequenceId sequence;
  std::uint32_t list = 0;              ///< among the rows of the forward that choose
  std::uint32_t draft = 0;             ///< of the team that this is
  std::uint32_t tokens = 0;            ///< visible
  std::uint32_t listed = kNone;        ///< of these, what comes before the team's own; kNone: it is no team
  bool corrected = false;              ///< its weights are no softmax over a subset
  std::vector<std::vector<std::uint32_t>> blocks;  ///< of its sequence, of each stack of layers
  std::vector<std::uint32_t> watched;  ///< tokens, ascending
  std::vector<ChoiceNote> notes;       ///< [layers, kv_heads], of policies that choose on the CPU
};

/// One forward that is audited: what its rows attended, which the device and the policies write down, and how that
/// compares with exact attention.
/// Thread safety: notes of different rows, layers and KV heads by any threads, while the forward runs, and pieces
/// of the comparison; else none.
class ForwardAudit {
 public:
  /// `memory`: as the verbs saw it that wrote down what was attended.
  ForwardAudit(const ForwardMemory& memory, const cpu::Kernels& kernels) : memory_(memory), kernels_(kernels) {}

  void add(AuditedRow row);
  /// `row`: among those that choose.
  [[nodiscard]] ChoiceNote& note(std::uint32_t row, std::uint32_t layer, std::uint32_t kv_head) noexcept {
    return rows_[row].notes[memory_.layer_head(layer, kv_head)];
  }
  [[nodiscard]] const std::vector<AuditedRow>& rows() const noexcept { return rows_; }

  /// Once the forward has run, before another audited one does: how many pieces of work it is to compare, which are
  /// done once each, by any threads.
  [[nodiscard]] std::uint32_t begin();
  void compare(std::uint32_t piece);
  /// Then: what was found of a row, to a report that has its heads.
  void report(std::uint32_t row, AuditReport& report) const noexcept;

 private:
  /// Of one row, layer and KV head.
  struct Result {
    std::vector<HeadFinding> heads;  ///< [group]
    std::uint32_t attended = 0;      ///< tokens, by some head
    std::uint32_t bypassed = 0;      ///< heads
  };
  void compare(std::uint32_t row, std::uint32_t layer, std::uint32_t kv_head, Result& result) const;
  /// Tokens that the row sees in a layer: the newest.
  [[nodiscard]] std::uint32_t visible(const AuditedRow& row, std::uint32_t layer) const noexcept {
    const std::uint32_t window = memory_.window_in(layer);
    return window == 0 || window > row.tokens ? row.tokens : window;
  }
  void attend_exactly(const AuditedRow& row, std::uint32_t layer, std::uint32_t kv_head, const float* q,
                      AuditedGroup& group) const;
  void mark(const AuditedRow& row, std::uint32_t layer, const ChoiceNote& note, std::uint64_t list,
            AuditedGroup& group) const;

  const ForwardMemory memory_;
  const cpu::Kernels& kernels_;
  std::vector<AuditedRow> rows_;
  std::vector<Result> results_;  ///< [rows, layers, kv_heads]
};

}  // namespace sluice::runtime
