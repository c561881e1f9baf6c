#pragma once

#include <memory>

#include "tests/soak/model.hpp"
#include "tests/soak/staging.hpp"

namespace sluice::test {

/// The same sequence once more, in an engine where nothing else happens: nothing is near, late or in flight beside it.
class Alone {
 public:
  /// @param options  of the engine that is compared; what is quiet about the other one is its own
  Alone(const EngineOptions& options, const Pool& pool, World& world);

  /// What the sequence said is what it says here.
  /// @throws Failure
  void compare(const Sequence& sequence, RoundStats& stats);

 private:
  void call(SequenceId& id, const Call& call);
  void forward(SequenceId id, const Call& call);
  void import(SequenceId id, const Call& call);
  void require_same(const Sequence& sequence, const PolicySpec& spec, std::size_t call, RoundStats& stats);

  const Pool& pool_;
  std::unique_ptr<Ground> ground_;
  Engine engine_;
  ForwardTensors tensors_;
  Staging staging_;
};

}  // namespace sluice::test
