#pragma once

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
  std::unique_ptr<Kept> next_;  ///< what else a team keeps: a list needs no memory to grow
};

}  // namespace sluice::cpu
