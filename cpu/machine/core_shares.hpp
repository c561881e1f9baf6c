#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "cpu/machine/topology.hpp"

namespace sluice::cpu {

/// Cores that an engine or a worker pool of this process computes on.
struct CoreClaim {
  Topology topology;            ///< those that it would have alone
  std::uint32_t numa_node = 0;  ///< whose cores it wants first
  bool named = false;           ///< a user has named the cores: it has all of them, and those who have not named any do
                                ///< without them
};

/// What it has of them.
struct CoreShare {
  std::vector<std::uint32_t> pus;  ///< OS indices, one of each core, near ones first; at least one
  std::uint32_t cores = 1;         ///< that it may keep busy: fewer where a control group grants less CPU time
};

/// Shares cores out: claims that name no cores get equal parts of those that no claim names, neighbours
/// together, near ones first. The shares are disjoint and cover all cores if there are enough, and each has one at
/// least. CPU time that a control group grants is shared out likewise.
[[nodiscard]] std::vector<CoreShare> divided(std::span<const CoreClaim* const> claims);

/// Those who compute on the cores of a process, and what each of them has while they do. Cores are shared out anew
/// whenever a share is taken or given back.
/// Thread safety: all calls, from any thread.
class CoreShares {
 public:
  /// Those of this process. Never destroyed: threads may end after `main` has.
  [[nodiscard]] static CoreShares& of_process();

  /// One share, until it is destroyed. The CoreShares must outlive it.
  class Lease {
   public:
    /// @throws std::bad_alloc
    [[nodiscard]] CoreShare share() const;
    /// Another number whenever the share may be another. Costs one load.
    [[nodiscard]] std::uint64_t generation() const noexcept {
      return claim_.get_deleter().from->generation_.load(std::memory_order_acquire);
    }
    [[nodiscard]] const Topology& topology() const noexcept { return claim_->topology; }
    /// Gives the share back before its destruction. `share` must not be called after it.
    void end() const noexcept { claim_.get_deleter().from->forget(*claim_); }

   private:
    friend class CoreShares;
    struct GiveBack {
      CoreShares* from;
      void operator()(const CoreClaim* claim) const noexcept {
        from->forget(*claim);
        delete claim;
      }
    };
    explicit Lease(std::unique_ptr<const CoreClaim, GiveBack> claim) : claim_(std::move(claim)) {}
    std::unique_ptr<const CoreClaim, GiveBack> claim_;
  };
  [[nodiscard]] Lease take(CoreClaim claim);

  /// Of all leases that live, in the order in which they were taken.
  [[nodiscard]] std::vector<CoreShare> shares() const;

 private:
  void forget(const CoreClaim& claim) noexcept;

  std::atomic<std::uint64_t> generation_{1};
  mutable std::mutex mutex_;
  std::vector<const CoreClaim*> claims_;  ///< guarded by mutex_
};

}  // namespace sluice::cpu
