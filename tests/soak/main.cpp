// Sequences that join and leave engines of many kinds, for minutes, in a process that is stopped and resumed: outputs
// stay right, and memory, threads, descriptors and the time of a forward stay where they were.
//
//   soak [--device host|cuda|cuda:N] [--seconds N] [--rounds N] [--turns N] [--steps N] [--seed S] [--round R]
//        [--stop-ms N] [--every-ms N] [--flat] [--keep-going] [--only KIND] [--without KIND]...
//
// A round gives each machine as many turns. Prints its seed and, on its last line, what happened; with --seed and
// --round the round that failed comes first.
// --steps ends with the round in which as many tokens have been decoded, and fails if they have not been in time. With
// it, and in a run of 1,500 turns of each machine, it is a failure if something has not happened that goes wrong on
// purpose. --keep-going goes on with the other kinds of machines behind one that failed. --flat also checks memory and
// time, which need minutes to tell growth from warming up and a machine that does nothing else.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/soak/ground.hpp"
#include "tests/soak/machine.hpp"
#include "tests/soak/options.hpp"
#include "tests/soak/resources.hpp"
#include "tests/soak/supervisor.hpp"
#include "tests/soak/tally.hpp"
#include "tests/support/random.hpp"

namespace {

using namespace sluice;
using namespace sluice::test;
using Steady = std::chrono::steady_clock;

constexpr int kSkipped = 77;
/// A device that has failed for good fails everything.
constexpr std::uint64_t kMostFailures = 20;

class Soak {
 public:
  explicit Soak(const SoakOptions& options)
      : options_(options),
        world_(options.gpu ? cuda_world(*options.gpu, faults_) : host_world(faults_)),
        pool_(world_->terrain(), 100),
        tally_(options) {
    for (const MachineKind& kind : machine_kinds()) {
      if (std::ranges::find(options_.without, kind.name) != options_.without.end()) continue;
      if (!options_.only.empty() && options_.only != kind.name) continue;
      machines_.push_back(std::make_unique<Machine>(kind, *world_, faults_, pool_));
    }
    if (machines_.empty()) throw std::runtime_error("no kind of machine is left");
  }

  /// @return the exit code
  int run() {
    const auto begin = Steady::now();
    std::uint64_t rounds = 0;
    do {
      run_round(options_.round + rounds++);
    } while (goes_on() && !tally_.has_steps() && rounds < options_.rounds &&
             Steady::now() < begin + std::chrono::seconds(options_.seconds));
    const bool passed = tally_.report({.rounds = rounds,
                                       .failures = failures_,
                                       .stops = shared_doing().stops,
                                       .faults = faults_->counts(),
                                       .time = Steady::now() - begin});
    return passed ? 0 : 1;
  }

 private:
  [[nodiscard]] bool goes_on() const noexcept {
    return failures_ == 0 || (options_.keep_going && failures_ < kMostFailures);
  }

  void run_round(std::uint64_t round) {
    RoundStats sum;
    for (const auto& each : machines_) {
      if (!goes_on()) return;
      Machine& machine = *each;
      shared_doing().round = round;
      shared_doing().kind = machine.kind().name;
      // By the kind, so that it does the same whichever others there are.
      const std::uint64_t seed = Random(options_.seed + round * 1000 + machine.kind().number).next();
      try {
        sum.add(machine.run(seed, Random(options_.seed + machine.kind().number).next(), options_.turns));
      } catch (const std::exception& error) {
        ++failures_;
        std::printf("soak: FAILED: %s\nsoak: again: --seed %llu --round %llu --only %s\n", error.what(),
                    static_cast<unsigned long long>(options_.seed), static_cast<unsigned long long>(round),
                    machine.kind().name);
        std::fflush(stdout);
        machine.abandon();
      }
    }
    tally_.add(sum, current_resources());
  }

  SoakOptions options_;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  std::unique_ptr<World> world_;
  const Pool pool_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::uint64_t failures_ = 0;
  Tally tally_;
};

int work(const SoakOptions& options) {
  try {
    if (options.gpu && cuda_devices() == 0) {
      std::printf("soak: skipped: no usable GPU\n");
      return kSkipped;
    }
    return Soak(options).run();
  } catch (const std::exception& error) {
    std::printf("soak: FAILED: %s\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  SoakOptions options;
  try {
    options = read_options({argv + 1, argv + argc});
    std::printf("soak: --seed %llu\n", static_cast<unsigned long long>(options.seed));
    const Stops stops{.every = std::chrono::milliseconds(options.stop_ms == 0 ? 0 : options.every_ms),
                      .longest = std::chrono::milliseconds(options.stop_ms),
                      .seed = options.seed};
    const Doing& doing = shared_doing();  // Before there is a second process.
    const int code = supervised([&] { return work(options); }, stops);
    if (code > 128) {
      std::printf("soak: FAILED: ended by signal %d; again: --seed %llu --round %llu --only %s\n", code - 128,
                  static_cast<unsigned long long>(options.seed), static_cast<unsigned long long>(doing.round.load()),
                  doing.kind.load());
    }
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: %s\n", error.what());
    return 2;
  }
}
