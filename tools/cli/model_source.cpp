#include "tools/cli/model_source.hpp"

#include <utility>

#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/llama/presets.hpp"

namespace sluice::tools {

Model load_model(const std::string& directory, const std::string& random_weights, std::uint32_t threads,
                 std::shared_ptr<Device> device) {
  if (directory.empty() == random_weights.empty()) {
    throw Error(Errc::invalid_argument, "give either --model DIR or --random-weights NAME");
  }
  ProgressBar bar("weights, MiB");
  const auto progress = [&bar](std::uint64_t done, std::uint64_t total) { bar.update(done / MiB, total / MiB); };
  ModelOptions options{.threads = threads, .device = std::move(device), .progress = progress};
  if (!directory.empty()) return Model(directory, options);
  constexpr std::uint64_t kSeed = 1;
  return Model::random(preset_config(random_weights), kSeed, options);
}

}  // namespace sluice::tools
