#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/engine.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/decode_attention.hpp"
#include "tools/cli/bench/decode_methods.hpp"
#include "tools/cli/bench/decode_prompt.hpp"
#include "tools/cli/bench/decode_room.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/fetch_share.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/runner.hpp"

namespace sluice::tools {

struct BenchDecodeOptions {
  std::string model;
  std::string random_weights = "llama-3.1-8b";
  std::string structure;  ///< of synthetic attention; empty: the model's own
  std::uint64_t seed = 0;
  std::string lengths = "32K,128K";
  std::string methods = "dense;hybrid/sluice;stream/sluice";
  std::string batches = "1";
  std::string kv_sizes;  ///< device memory for keys and values with all that goes with them; empty: what `near` takes
  std::string near = "5%";
  std::string far;
  float fetch_share = kFetchAuto;
  Handover handover = EngineOptions{}.handover;
  Graphs graphs = Graphs::automatic;
  DType kv_dtype = DType::bf16;
  std::uint32_t steps = 16;
  std::uint32_t warm_up = 16;
  std::uint32_t audited = 0;
  std::uint32_t threads = 0;
  std::uint32_t drafts = 1;
  DeviceFlags device;
  OutputOptions output;
};

/// Times whole models, one length, batch and method after the other, into a table.
class DecodeBench {
 public:
  /// `device` null: the host, for trying the command out, not for its times.
  DecodeBench(const BenchDecodeOptions& options, std::shared_ptr<Device> device);

  /// A batch of prompts of that length, with so many bytes of device memory for keys and values; 0: what --near takes.
  void run(std::uint32_t length, std::uint32_t batch, std::uint64_t kv_bytes, const std::vector<DecodeMethod>& methods,
           ProgressBar& bar);
  [[nodiscard]] Table take() { return std::move(table_); }
  [[nodiscard]] Table take_room() { return room_.take(); }
  [[nodiscard]] const Device& device() const noexcept { return *device_; }

 private:
  /// What forwards are of.
  struct Forwards {
    Attention& attention;
    std::uint32_t sequences = 1;
    Verified verified{};
    Launch launch = Launch::enqueue;
  };
  /// What they came to.
  struct Decoded {
    std::vector<double> ms{};   ///< of each; empty: there is no room
    std::vector<int> tokens{};  ///< that the first sequence would go on with
  };
  /// What a row of the table says.
  struct Run {
    Decoded decoded{};
    std::uint32_t at_once = 0;       ///< sequences of a forward
    Json device_bytes{};
    bool replayed = false;
    DecodeScore score{};
    PageLayout layout{};
  };

  /// What ratios are to: the first that had room.
  struct First {
    std::optional<double> rate{};
    std::vector<int> tokens{};
  };

  /// Whether forwards are of the same tokens, whatever the method: else each goes on with its own.
  [[nodiscard]] bool given() const noexcept { return !options_.structure.empty(); }
  /// Makes the prompt, unless it is there.
  void take_prompt(std::uint32_t length, std::uint32_t batch);
  /// With the budget of far tokens that --far says, at this length.
  [[nodiscard]] DecodeMethod limited(std::uint32_t length, std::uint32_t batch, const DecodeMethod& method);
  /// Of one sequence.
  [[nodiscard]] EngineOptions sizes(const DecodeMethod& method, std::uint32_t length, const Verified& verified) const;
  void run(const DecodeBatch& batch, const DecodeMethod& method, const Verified& verified, First& first);
  /// As many sequences at a time as there is room for; the others wait for their turn.
  Run run_dense(const DecodeBatch& batch, const Verified& verified);
  Run run_engine(const DecodeBatch& batch, const DecodeMethod& method, const Verified& verified);
  void add_row(const DecodeBatch& batch, const DecodeMethod& method, const Verified& verified, const Run& run,
               First& first);
  /// Forwards of new tokens of which the first of each sequence stays.
  Decoded decode(const Forwards& forwards, std::uint32_t position, std::uint32_t steps);

  const BenchDecodeOptions& options_;
  Model model_;
  std::shared_ptr<Device> device_;
  AttentionShape shape_;
  std::unique_ptr<Stream> stream_;
  Activations work_;  ///< of a method at a time: graphs that it has refer to that one's attention
  std::unique_ptr<DecodePrompt> prompt_;
  double near_;
  std::optional<scheduler::LaneRates> rates_;  ///< measured once they are asked for
  int token_ = 1;
  Table table_;
  RoomTable room_;
};

}  // namespace sluice::tools
