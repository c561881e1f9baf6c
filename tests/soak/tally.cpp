#include "tests/soak/tally.hpp"

#include <cstdio>
#include <utility>

namespace sluice::test {
namespace {

/// Of rows of which rounding decides what they attend, one in as many may attend something else.
constexpr std::uint64_t kUnlike = 10;

/// Of each machine: the rarest of what goes wrong on purpose comes about once in 60.
constexpr std::uint64_t kEnoughTurns = 1500;

}  // namespace

void Tally::add(const RoundStats& round, const Resources& now) {
  series_.allocated.push_back(static_cast<double>(now.allocated_bytes) / 0x1p20);
  series_.resident.push_back(static_cast<double>(now.resident_bytes) / 0x1p20);
  series_.threads.push_back(static_cast<double>(now.threads));
  series_.descriptors.push_back(static_cast<double>(now.descriptors));
  if (round.forwards > 0) series_.forward_us.push_back(1e6 * round.seconds / static_cast<double>(round.forwards));
  total_.add(round);
}

std::vector<std::string> Tally::grown() const {
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
  return grown;
}

std::vector<std::string> Tally::missing(const End& end) const {
  std::vector<std::pair<std::string, std::uint64_t>> wanted{{"forward", total_.forwards},
                                                            {"comparison with float64", total_.checked}};
  const bool all = options_.all_kinds();
  if (all) wanted.emplace_back("sequence that was parked and resumed", total_.resumed);
  // So many steps, or turns, are enough for anything that may happen.
  if (all && (options_.steps != 0 || end.rounds * options_.turns >= kEnoughTurns)) {
    const std::pair<std::string, std::uint64_t> more[] = {{"comparison with the sequence alone", total_.alone},
                                                          {"replayed forward", total_.replayed},
                                                          {"delay of a thread", end.faults.delays},
                                                          {"delay of the device", total_.delays},
                                                          {"long delay of the device", total_.holds},
                                                          {"late answer", total_.late},
                                                          {"part that the device could not do", total_.broken},
                                                          {"thread without memory to choose", total_.unchosen},
                                                          {"engine that could not be built", total_.unbuilt},
                                                          {"forward that was not enqueued as planned", total_.slips},
                                                          {"forward that was taken back", total_.cancelled}};
    wanted.insert(wanted.end(), std::begin(more), std::end(more));
  }
  const std::chrono::milliseconds first(2 * options_.every_ms + options_.stop_ms + 1000);
  if (options_.stop_ms != 0 && end.time > first) wanted.emplace_back("stop", end.stops);
  std::vector<std::string> missing;
  for (const auto& [what, count] : wanted) {
    if (count == 0) missing.push_back("there was no " + what);
  }
  if (total_.decoded < options_.steps)
    missing.push_back(std::to_string(total_.decoded) + " steps came about of " + std::to_string(options_.steps));
  return missing;
}

bool Tally::report(const End& end) const {
  std::vector<std::string> wrong = grown();
  for (std::string& text : missing(end)) wrong.push_back(std::move(text));
  if (total_.unlike * kUnlike > total_.rounded)
    wrong.push_back(std::to_string(total_.unlike) + " of " + std::to_string(total_.rounded) +
                    " rows attended something else than alone, more than rounding explains");
  for (const std::string& text : wrong) std::printf("soak: FAILED: %s\n", text.c_str());
  const bool passed = wrong.empty() && end.failures == 0;
  print_line(end, passed);
  return passed;
}

void Tally::print_line(const End& end, bool passed) const {
  std::string line = passed ? "soak: passed" : "soak: FAILED";
  const auto say = [&](const char* before, std::uint64_t count, const char* what) {
    line += before + std::to_string(count) + " " + what;
  };
  say(": ", total_.decoded, "steps");
  say(", ", total_.forwards, "forwards");
  say(" (", total_.replayed, "replayed)");
  say(", ", end.rounds, "rounds");
  say(", ", total_.sequences, "sequences");
  say("; delays: ", end.faults.delays, "of threads");
  say(" and ", end.faults.stalls, "long ones");
  say(", ", total_.delays, "of the device");
  say(" and ", total_.holds, "long ones");
  say("; ", end.stops, "stops of the process");
  say("; failed forwards: ", total_.failed, "in all");
  say(", ", total_.late, "late");
  say(", ", total_.broken, "of the device");
  say(", ", total_.unchosen, "without memory to choose");
  say(", ", total_.slips, "not enqueued as planned");
  say("; ", total_.cancelled, "taken back");
  say("; ", total_.unbuilt, "engines not built");
  say("; ", total_.resumed, "sequences parked and resumed");
  say("; ", total_.refused, "calls without room");
  say("; compared: ", total_.checked, "rows of a layer with float64");
  say(", ", total_.alone, "rows with the sequence alone");
  say(" (", total_.unlike, "unlike");
  say(" of ", total_.rounded, "where rounding decides)");
  say("; ", static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(end.time).count()), "s");
  std::printf("%s\n", line.c_str());
}

}  // namespace sluice::test
