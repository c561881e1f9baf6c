// Sequences that join and leave engines of many kinds, for minutes, in a process that is stopped and resumed: outputs
// stay right, and memory, threads, descriptors and the time of a forward stay where they were.
//
//   soak [--seconds N] [--rounds N] [--seed S] [--round R] [--stop-ms N] [--every-ms N] [--flat] [--only KIND]
//        [--without KIND]...
//
// Prints its seed; with --seed and --round the round that failed comes first. --flat also checks memory and time, which
// need minutes to tell growth from warming up and a machine that does nothing else.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "sluice/error.hpp"
#include "tests/soak/machine.hpp"
#include "tests/soak/resources.hpp"
#include "tests/soak/supervisor.hpp"
#include "tests/support/random.hpp"

namespace {

using namespace sluice;
using namespace sluice::test;
using Clock = std::chrono::steady_clock;

struct Options {
  std::uint64_t seconds = 10;
  std::uint64_t rounds = 1'000'000;  ///< at most
  std::uint64_t seed = std::random_device()();
  std::uint64_t round = 0;
  std::uint64_t stop_ms = 0;  ///< longest stop; 0: none
  std::uint64_t every_ms = 2000;
  bool flat = false;
  std::string only;
  std::vector<std::string> without;
};

std::uint64_t whole_number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    throw std::runtime_error("'" + text + "' is not a whole number");
  return value;
}

Options read_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (name == "--flat") {
      options.flat = true;
      continue;
    }
    if (++i == arguments.size()) throw std::runtime_error(name + " needs a value, or there is no such option");
    const std::string& value = arguments[i];
    if (name == "--seconds") {
      options.seconds = whole_number(value);
    } else if (name == "--rounds") {
      options.rounds = whole_number(value);
    } else if (name == "--seed") {
      options.seed = whole_number(value);
    } else if (name == "--round") {
      options.round = whole_number(value);
    } else if (name == "--stop-ms") {
      options.stop_ms = whole_number(value);
    } else if (name == "--every-ms") {
      options.every_ms = whole_number(value);
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--without") {
      options.without.push_back(value);
    } else {
      throw std::runtime_error("there is no option " + name);
    }
  }
  return options;
}

/// What is compared between the first and the last third, one value per round.
struct Series {
  std::vector<double> allocated, resident, threads, descriptors, forward_us;
};

class Soak {
 public:
  explicit Soak(const Options& options) : options_(options) {
    const cpu::Topology topology;
    workers_ = std::make_shared<cpu::Workers>(
        topology, cpu::WorkersOptions{.threads = 2,
                                      .pin = false,
                                      .timeout = kSoakTimeout,
                                      .before_body = [faults = faults_](std::uint32_t) { faults->compute(); }});
    for (const MachineKind& kind : machine_kinds()) {
      const auto& no = options_.without;
      if (std::find(no.begin(), no.end(), kind.name) != no.end()) continue;
      if (!options_.only.empty() && options_.only != kind.name) continue;
      machines_.push_back(std::make_unique<Machine>(kind, workers_, faults_, pool_));
    }
    if (machines_.empty()) throw std::runtime_error("no kind of machine is left");
  }

  /// @return the exit code
  int run() {
    const auto deadline = Clock::now() + std::chrono::seconds(options_.seconds);
    std::uint64_t round = options_.round;
    do {
      if (!run_round(round++)) return 1;
    } while (Clock::now() < deadline && round - options_.round < options_.rounds);
    std::printf(
        "soak: %llu rounds, %llu sequences, %llu forwards, %llu rows of a layer compared with float64, %llu rows with "
        "the sequence alone, %llu forwards failed (%llu late, %llu of the device), %llu were taken back, "
        "%llu sequences were parked and resumed, %llu calls without room\n",
        static_cast<unsigned long long>(round - options_.round), static_cast<unsigned long long>(total_.sequences),
        static_cast<unsigned long long>(total_.forwards), static_cast<unsigned long long>(total_.checked),
        static_cast<unsigned long long>(total_.alone), static_cast<unsigned long long>(total_.failed),
        static_cast<unsigned long long>(total_.late), static_cast<unsigned long long>(total_.broken),
        static_cast<unsigned long long>(total_.cancelled), static_cast<unsigned long long>(total_.resumed),
        static_cast<unsigned long long>(total_.refused));
    return is_flat() && did_something() ? 0 : 1;
  }

 private:
  bool run_round(std::uint64_t round) {
    RoundStats sum;
    for (const auto& each : machines_) {
      Machine& machine = *each;
      shared_doing().round = round;
      shared_doing().kind = machine.kind().name;
      // By the kind, so that it does the same whichever others there are.
      const std::uint64_t seed = Random(options_.seed + round * 1000 + machine.kind().number).next();
      try {
        sum.add(machine.run(seed, Random(options_.seed + machine.kind().number).next()));
      } catch (const std::exception& error) {
        std::printf("soak: FAILED: %s\nsoak: again: --seed %llu --round %llu --only %s\n", error.what(),
                    static_cast<unsigned long long>(options_.seed), static_cast<unsigned long long>(round),
                    machine.kind().name);
        return false;
      }
    }
    const Resources now = current_resources();
    series_.allocated.push_back(static_cast<double>(now.allocated_bytes) / 0x1p20);
    series_.resident.push_back(static_cast<double>(now.resident_bytes) / 0x1p20);
    series_.threads.push_back(static_cast<double>(now.threads));
    series_.descriptors.push_back(static_cast<double>(now.descriptors));
    if (sum.forwards > 0) series_.forward_us.push_back(1e6 * sum.seconds / static_cast<double>(sum.forwards));
    total_.add(sum);
    return true;
  }

  bool is_flat() const {
    const auto report = [](const char* what, const std::vector<double>& values) {
      if (values.size() < 3) return;
      std::printf("soak: %s: %.4g, then %.4g\n", what, median_of_third(values, 0), median_of_third(values, 2));
    };
    report("allocated MiB", series_.allocated);
    report("resident MiB", series_.resident);
    report("threads", series_.threads);
    report("descriptors", series_.descriptors);
    report("us per forward", series_.forward_us);
    // Kept engines start some of their threads when they first need them.
    const double slack = 4;
    std::vector<std::string> grown{growth("threads", series_.threads, {.slack = slack}),
                                   growth("file descriptors", series_.descriptors, {.slack = slack})};
    if (options_.flat) {
      grown.push_back(growth("allocated memory (MiB)", series_.allocated, {.factor = 1.05, .slack = 2}));
      grown.push_back(growth("resident memory (MiB)", series_.resident, {.factor = 1.1, .slack = 16}));
      grown.push_back(growth("time per forward (us)", series_.forward_us, {.factor = 2.5}));
    }
    std::erase(grown, std::string());
    for (const std::string& text : grown) std::printf("soak: FAILED: %s\n", text.c_str());
    return grown.empty();
  }

  bool did_something() const {
    // With few kinds of machines, chance may park none.
    const bool all_kinds = options_.only.empty() && options_.without.empty();
    const bool some = total_.forwards > 0 && total_.checked > 0 && (!all_kinds || total_.resumed > 0);
    if (!some) std::printf("soak: FAILED: nothing ran, or was compared, or was parked and resumed\n");
    return some;
  }

  Options options_;
  const Pool pool_{kSoakShape, kPoolTokens, 100};
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  std::shared_ptr<const cpu::Workers> workers_;
  std::vector<std::unique_ptr<Machine>> machines_;
  RoundStats total_;
  Series series_;
};

int work(const Options& options) {
  try {
    return Soak(options).run();
  } catch (const std::exception& error) {
    std::printf("soak: FAILED: %s\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
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
