// What the link command measures with.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "gpu/device/path_chooser.hpp"
#include "sluice/run_clock.hpp"
#include "tests/support/catch.hpp"
#include "tools/link/calibrate.hpp"
#include "tools/link/memory_traffic.hpp"

using namespace sluice;
using namespace sluice::tools;

TEST_CASE("a calibration covers both directions and every path, on an idle device and on a busy one",
          "[transfer][profile]") {
  const auto device = make_cuda_device();
  const TransferProfile profile = calibrate_transfers(*device);
  REQUIRE(profile.gather_blocks >= 1);
  REQUIRE(profile.busy_gather_blocks >= 1);
  // Where kernels are made to run one at a time, none is busy beside them.
  const bool overlap = gpu::cuda_device(*device, "test").memory_operations();
  for (const TransferPath path :
       {TransferPath::copy_engine, TransferPath::batch, TransferPath::gather, TransferPath::staged}) {
    for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
      for (const bool to_device : {true, false}) {
        if (load == TransferLoad::busy && !overlap) continue;
        const auto count = std::count_if(profile.samples.begin(), profile.samples.end(), [&](const auto& sample) {
          return sample.path == path && sample.load == load && sample.to_device == to_device && sample.device_us > 0.0;
        });
        CAPTURE(to_string(path), to_string(load), to_device);
        REQUIRE((count > 0) == (to_device || path != TransferPath::staged));
      }
    }
  }
  REQUIRE_NOTHROW(gpu::PathChooser(std::make_shared<const TransferProfile>(profile)));
}

TEST_CASE("the memory load goes on while it is renewed and ends by itself", "[transfer][profile]") {
  gpu::CudaDevice device(CudaDeviceOptions{});
  if (!device.memory_operations()) return;  // Launches may then wait for their kernels.
  MemoryTraffic traffic(device);
  REQUIRE_FALSE(traffic.running());
  const Deadline end = deadline_after(std::chrono::milliseconds(4 * MemoryTraffic::kSlice_us / 1000));
  int renewals = 0;
  for (; RunClock::now() < end; ++renewals) {
    traffic.renew();
    REQUIRE(traffic.running());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  REQUIRE(renewals > 0);
  const Deadline patience = deadline_after(std::chrono::seconds(10));
  while (traffic.running() && RunClock::now() < patience) std::this_thread::yield();
  REQUIRE_FALSE(traffic.running());
}
