#pragma once

#include <atomic>
#include <memory>

namespace sluice::cpu {

/// Memory that workers may use for longer than the call that it belongs to; see Workers::keep.
class Kept {
 public:
  Kept() = default;
  virtual ~Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

 private:
  friend class Team;
  friend void keep_for_good(std::unique_ptr<Kept> object) noexcept;
  std::unique_ptr<Kept> next_;  ///< what else a team keeps: a list needs no memory to grow
  Kept* older_ = nullptr;       ///< what else is never freed
};

/// Never frees it: for memory of threads whose end cannot be observed. Listed, so that it is no leak.
inline void keep_for_good(std::unique_ptr<Kept> object) noexcept {
  static std::atomic<Kept*> newest{nullptr};
  Kept* const left = object.release();
  left->older_ = newest.load();
  while (!newest.compare_exchange_weak(left->older_, left)) {
  }
}

}  // namespace sluice::cpu
