#pragma once

#include <cstdint>
#include <string>

#include "sluice/engine.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What a row of `bench decode` is of: a batch of equal prompts.
struct DecodeBatch {
  std::uint32_t length = 0;  ///< tokens of each
  std::uint32_t sequences = 1;
  std::uint64_t kv_bytes = 0;  ///< device memory for keys, values and all that goes with them; 0: no bound
};

/// Options of an engine for one sequence become those for as many equal ones.
[[nodiscard]] EngineOptions for_sequences(EngineOptions options, std::uint32_t sequences);

/// What a sequence takes of device memory, by component, and how many of them fit.
class RoomTable {
 public:
  RoomTable();
  /// `options`: for one sequence.
  void add(const DecodeBatch& batch, const std::string& method, const EngineOptions& options,
           const EngineMemoryUse& use, Device* device);
  /// Everything in device memory, `bytes` of a sequence.
  void add_dense(const DecodeBatch& batch, std::uint64_t bytes);
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  Table table_;
};

}  // namespace sluice::tools
