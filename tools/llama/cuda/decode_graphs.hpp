#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "tools/llama/graph.hpp"

namespace sluice::tools::cuda {

/// Forwards that decode as graphs, one for each number of rows and variant. They refer to the buffers that they were
/// captured with. Thread safety: none.
class DecodeGraphs {
 public:
  struct Key {
    std::uint32_t rows = 0;
    std::uint32_t variant = 0;  ///< see Activations
    friend constexpr auto operator<=>(const Key&, const Key&) = default;
  };
  /// Puts on the stream what `enqueue` does, which is always the same for a key. That of the first call runs as
  /// it is, so that libraries choose and load what they need; the second is captured, and replayed from then on. What
  /// CUDA does not make a graph of is enqueued, then and later. Returns whether it was a graph.  @throws what `enqueue`
  /// throws
  bool run(Key key, cudaStream_t stream, const std::function<void()>& enqueue);
  /// To be called before buffers go that graphs refer to; none may run.
  void clear() noexcept { captured_.clear(); }

 private:
  struct Captured {
    bool refused = false;
    std::unique_ptr<CapturedWork> work{};
  };
  std::map<Key, Captured> captured_;
};

}  // namespace sluice::tools::cuda
