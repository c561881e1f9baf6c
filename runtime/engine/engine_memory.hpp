#pragma once

#include <memory>
#include <vector>

#include "cpu/host_pool.hpp"
#include "sluice/decode.hpp"
#include "sluice/device.hpp"
#include "sluice/engine.hpp"

namespace sluice::runtime {

/// What is wrong with the options, by name.  @throws Error{Errc::invalid_argument}
void validate(const EngineOptions& options);

/// All memory of an engine: reserved when it is built, never grown.
class EngineMemory {
 public:
  /// @throws Error{Errc::out_of_capacity}; Error{Errc::unsupported} if the verbs refuse the shape or the bucket.
  EngineMemory(const EngineOptions& options, Device& device, DecodeVerbs& verbs, const cpu::Topology& topology,
               std::uint32_t numa_node, const cpu::Workers& workers);

  /// Of forwards that decode.
  [[nodiscard]] const DecodeMemory& decode() const noexcept { return decode_; }
  /// Of forwards that bring tokens in: rows of their own, and nothing that only attention needs.
  [[nodiscard]] const DecodeMemory& import() const noexcept { return import_; }

 private:
  void take_device(const EngineOptions& options, Device& device, DecodeVerbs& verbs);
  void take_pinned(const EngineOptions& options, Device& device);
  /// Device memory as an engine begins: no block is near, everything else is 0.
  void clear(const EngineOptions& options, Device& device);

  std::unique_ptr<cpu::HostPool> far_;
  std::unique_ptr<Buffer> near_;
  std::unique_ptr<Buffer> codes_;
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> pinned_;
  DecodeMemory decode_;
  DecodeMemory import_;
};

}  // namespace sluice::runtime
