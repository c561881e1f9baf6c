#pragma once

#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/step/core_verbs.hpp"
#include "sluice/step/prefill_verbs.hpp"
#include "sluice/step/select_verbs.hpp"

namespace sluice {

/// All verbs of one device, by use. `cpu::Backend` computes before it returns and ignores `stream` (null is fine). A
/// device's backend only enqueues on `stream`; then everything that a task points to, the task array included, must
/// stay unchanged until the stream has passed the verb.
///
/// Verbs do not allocate device memory and do not synchronise. A verb with no tasks does nothing.
/// Thread safety: verbs may be called from several threads at once.
/// @throws Error{Errc::unsupported} for a shape that `unsupported_reasons` names; nothing was written.
class Backend : public CoreVerbs, public SelectVerbs, public PrefillVerbs {
 public:
  /// Why this backend cannot serve the shape; empty if it can.
  [[nodiscard]] virtual std::vector<std::string> unsupported_reasons(const AttentionShape& shape,
                                                                     const PageLayout& layout) const = 0;
};

}  // namespace sluice
