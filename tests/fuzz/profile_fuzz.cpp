// Transfer profiles: what is read chooses a path for every batch and is read back as it was written, and a kept
// profile, whatever it holds, never ends the program.

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "gpu/device/path_chooser.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tests/fuzz/scratch.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tools/cli/link/profile_cache.hpp"
#include "tools/cli/link/transfer_profile.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

const CudaDeviceFacts kFacts{.name = "GPU", .pci_bus_id = "0000:0F:00.0", .driver = 13000};

bool same(const TransferSample& a, const TransferSample& b) {
  return a.path == b.path && a.load == b.load && a.to_device == b.to_device && a.block_bytes == b.block_bytes &&
         a.blocks == b.blocks && a.host_us == b.host_us && a.device_us == b.device_us;
}

bool same(const TransferProfile& a, const TransferProfile& b) {
  return a.gather_blocks == b.gather_blocks && a.busy_gather_blocks == b.busy_gather_blocks &&
         std::equal(a.samples.begin(), a.samples.end(), b.samples.begin(), b.samples.end(),
                    [](const TransferSample& x, const TransferSample& y) { return same(x, y); });
}

void check_times(const gpu::PathChooser& chooser, const gpu::PathChooser::Batch& batch) {
  constexpr std::array kPaths{TransferPath::copy_engine, TransferPath::batch, TransferPath::gather,
                              TransferPath::staged};
  for (const TransferPath path : kPaths) {
    const double us = chooser.device_us(path, batch);
    FUZZ_REQUIRE(!std::isnan(us) && us >= 0.0);
  }
  const TransferPath chosen = chooser.choose(batch);
  FUZZ_REQUIRE(chosen != TransferPath::automatic && chosen <= TransferPath::staged);
  if (batch.blocks <= 1) return;
  for (const TransferPath path : kPaths) {
    if (path == TransferPath::staged && !(batch.to_device && batch.may_stage)) continue;
    FUZZ_REQUIRE(chooser.device_us(chosen, batch) <= chooser.device_us(path, batch));
  }
}

void check_choices(std::shared_ptr<const TransferProfile> profile) {
  const gpu::PathChooser chooser(std::move(profile));
  for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
    FUZZ_REQUIRE(chooser.gather_blocks(load) >= 1 && chooser.gather_blocks(load) <= 65'535);
    for (const bool to_device : {false, true}) {
      for (const std::uint64_t bytes : {1ull, 4096ull, 100'000ull, 1ull << 40}) {
        for (const std::uint32_t blocks : {0u, 1u, 2u, 100u, 0xffff'ffffu}) {
          check_times(chooser, {.load = load,
                                .to_device = to_device,
                                .may_stage = blocks % 2 == 0,
                                .block_bytes = bytes,
                                .blocks = blocks});
        }
      }
    }
  }
}

/// What is measured where the kept profile does not hold.
TransferProfile measured() {
  return {.samples = {{.path = TransferPath::batch, .block_bytes = 4096, .blocks = 8, .device_us = 9.0}}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TemporaryDirectory scratch(scratch_root());
  static const std::string name = tools::profile_file_name(kFacts);
  const std::string file = scratch.write(name, text_of(data, size));

  std::optional<tools::MeasuredProfile> read;
  if (accepts([&] { read = tools::load_measured_profile(file); })) {
    FUZZ_REQUIRE(!read->profile->samples.empty());
    check_choices(read->profile);
    const std::string copy = scratch.file("copy.json");
    tools::save_transfer_profile(*read->profile, read->facts, copy);
    const tools::MeasuredProfile again = tools::load_measured_profile(copy);
    FUZZ_REQUIRE(same(*again.profile, *read->profile) && again.facts == read->facts);
  }
  const bool kept = read && read->facts == kFacts;
  const auto profile = tools::cached_profile(scratch.path(), kFacts, measured, [](const std::string&) {});
  FUZZ_REQUIRE(profile != nullptr && same(*profile, kept ? *read->profile : measured()));
  FUZZ_REQUIRE(same(*tools::load_measured_profile(file).profile, *profile));
  return 0;
}
