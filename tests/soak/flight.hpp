#pragma once

#include <cstdint>
#include <vector>

#include "tests/soak/model.hpp"

namespace sluice::test {

/// Rows of one sequence in a forward.
struct Part {
  Sequence* sequence = nullptr;
  std::uint32_t row = 0;    ///< of the forward, the first
  std::uint32_t first = 0;  ///< position of its token
  std::uint32_t count = 0;
  std::uint32_t right = 0;  ///< of drafts, as many are accepted
  bool prefill = false;
  std::size_t call = 0;  ///< of the sequence
};

/// What the caller of a forward does wrong.
enum class Slip {
  none,
  not_enqueued,  ///< the next one is planned before it is
  half,          ///< likewise, before all of its layers are
  twice,         ///< its first layer comes twice
  other_bucket,  ///< what runs is not what was planned
};

/// A forward in flight.
struct Flight {
  Batch batch;
  Bucket bucket;  ///< as it was asked for
  std::uint32_t tensors = 0;
  std::vector<Part> parts;
  Slip slip = Slip::none;
  std::uint32_t recorded = kNone;  ///< the bucket of those that are recorded; kNone: it is enqueued
  bool doomed = false;  ///< it fails, or one before it that is in flight
};

}  // namespace sluice::test
