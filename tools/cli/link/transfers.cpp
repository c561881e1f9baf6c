#include <algorithm>
#include <limits>
#include <map>

#include "tools/cli/link/machine.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {


/// Share of the best path's rate that `auto` has to reach.
constexpr double kAutoTarget = 0.95;
constexpr double kPageTarget_gbps = 51.0;
/// Of a sample: longer ones vary little, and fewer are taken.
constexpr double kLong_us = 1000.0;

enum class Way { to_device, to_host, both };
const char* name_of(Way way) { return way == Way::to_device ? "h2d" : way == Way::to_host ? "d2h" : "both"; }

std::vector<std::uint64_t> block_sizes(bool quick) {
  if (quick) return {4 * KiB, 8 * KiB, 16 * KiB, 64 * KiB, 512 * KiB};
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t bytes = 512; bytes <= 2 * MiB; bytes *= 2) sizes.push_back(bytes);
  return sizes;
}

std::vector<std::uint32_t> counts(bool quick) {
  if (quick) return {16, 256, 4096};
  return {4, 16, 64, 256, 1024, 4096};
}

/// One line of the sweep.
struct Point {
  Way way{};
  TransferLoad load{};
  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;
  std::map<TransferPath, TransferTiming> landed{};
  std::map<TransferPath, std::optional<double>> gated_us{};  ///< of idle devices, one way
  TransferTiming automatic{};

  [[nodiscard]] std::uint64_t bytes() const { return block_bytes * blocks * (way == Way::both ? 2 : 1); }
  [[nodiscard]] TransferPath best() const {
    return std::min_element(landed.begin(), landed.end(),
                            [](const auto& a, const auto& b) { return a.second.device_us < b.second.device_us; })
        ->first;
  }
  /// Of the best path's rate: 1 where it is the best path. Its own measurement counts only if it is better than that
  /// of the path that it took, as both are the same work.
  [[nodiscard]] double automatic_share() const {
    double us = automatic.device_us;
    if (const auto taken = landed.find(automatic.path); taken != landed.end())
      us = std::min(us, taken->second.device_us);
    return std::min(1.0, landed.at(best()).device_us / us);
  }
};

class Sweep {
 public:
  explicit Sweep(LinkMachine& machine) : machine_(machine) {}

  /// One way: the paths by turns, and `auto` among them, as close calls are decided by less than the link drifts.
  [[nodiscard]] Point measure(Way way, TransferLoad load, std::uint64_t block_bytes, std::uint32_t blocks) {
    Point point{.way = way, .load = load, .block_bytes = block_bytes, .blocks = blocks};
    std::vector<TransferCase> rivals;
    const auto add = [&](TransferPath path) {
      rivals.push_back({.choice = {.path = path, .load = load},
                        .to_device = way == Way::to_device,
                        .block_bytes = block_bytes,
                        .blocks = blocks});
    };
    for (const TransferPath path : link_paths(way == Way::to_device)) add(path);
    add(TransferPath::automatic);
    const int samples = machine_.options.samples;
    const auto timings = machine_.bench.landed(rivals, {.samples = samples, .enough_us = samples * kLong_us});
    for (std::size_t i = 0; i + 1 < rivals.size(); ++i) {
      point.landed[rivals[i].choice.path] = timings[i];
      if (load == TransferLoad::idle)
        point.gated_us[rivals[i].choice.path] = machine_.bench.gated_us(rivals[i], samples);
    }
    point.automatic = timings.back();
    return point;
  }
  [[nodiscard]] Point measure_both(std::uint64_t block_bytes, std::uint32_t blocks) {
    Point point{.way = Way::both, .block_bytes = block_bytes, .blocks = blocks};
    for (const TransferPath path : link_paths(false)) {
      const TransferCase what{.choice = {.path = path}, .block_bytes = block_bytes, .blocks = blocks};
      point.landed[path] = {.device_us = machine_.bench.both_us(what, machine_.options.samples), .path = path};
    }
    return point;
  }
  void verify(bool to_device, std::uint64_t block_bytes) {
    const auto blocks = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(4 * MiB / block_bytes, 2, 64));
    for (const TransferPath path : link_paths(to_device))
      machine_.bench.verify(
          {.choice = {.path = path}, .to_device = to_device, .block_bytes = block_bytes, .blocks = blocks});
  }

 private:
  LinkMachine& machine_;
};

Json rate(const Point& point, TransferPath path) {
  const auto found = point.landed.find(path);
  return found == point.landed.end() ? Json() : Json(link_gbps(point.bytes(), found->second.device_us));
}

Table rates_table(const std::vector<Point>& points) {
  Table table{.key = "transfers",
              .title = "Scattered blocks, GB/s from enqueuing to landing (both: device time)",
              .columns = {{"direction", "way"},
                          {"load", "device"},
                          {"block_bytes", "block"},
                          {"blocks", "blocks"},
                          {"copy_engine_gbps", "copy engine", 1},
                          {"batch_gbps", "batch", 1},
                          {"gather_gbps", "gather", 1},
                          {"staged_gbps", "staged", 1},
                          {"auto_gbps", "auto", 1},
                          {"auto_path", "auto took"},
                          {"auto_share", "auto of best", 0, Column::Show::percent}}};
  for (const Point& point : points) {
    const bool one_way = point.way != Way::both;
    table.rows.push_back({name_of(point.way), to_string(point.load), point.block_bytes, point.blocks,
                          rate(point, TransferPath::copy_engine), rate(point, TransferPath::batch),
                          rate(point, TransferPath::gather), rate(point, TransferPath::staged),
                          one_way ? Json(link_gbps(point.bytes(), point.automatic.device_us)) : Json(),
                          one_way ? Json(to_string(point.automatic.path)) : Json(),
                          one_way ? Json(point.automatic_share()) : Json()});
  }
  return table;
}

Table times_table(const std::vector<Point>& points) {
  Table table{
      .key = "times",
      .title =
          "One way on an idle device: microseconds of the enqueuing thread, and of the device once all is enqueued",
      .columns = {{"direction", "way"}, {"block_bytes", "block"}, {"blocks", "blocks"}}};
  for (const TransferPath path : link_paths(true)) {
    const std::string name = to_string(path);
    table.columns.push_back({name + "_host_us", name + ", host", 1});
    table.columns.push_back({name + "_device_us", name + ", device", 1});
  }
  for (const Point& point : points) {
    if (point.way == Way::both || point.load == TransferLoad::busy) continue;
    std::vector<Json> row{name_of(point.way), point.block_bytes, point.blocks};
    for (const TransferPath path : link_paths(true)) {
      const auto landed = point.landed.find(path);
      const auto gated = point.gated_us.find(path);
      row.push_back(landed == point.landed.end() ? Json() : Json(landed->second.host_us));
      row.push_back(gated == point.gated_us.end() || !gated->second ? Json() : Json(*gated->second));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

/// "16K: gather, from 64 blocks batch": the best path of each size as the count grows.
void judge_paths(const std::vector<Point>& points, LinkFindings& findings) {
  std::map<std::uint64_t, std::string> by_size;
  std::map<std::uint64_t, TransferPath> last;
  for (const Point& point : points) {
    if (point.way != Way::to_device || point.load == TransferLoad::busy) continue;
    const TransferPath best = point.best();
    std::string& text = by_size[point.block_bytes];
    const auto before = last.find(point.block_bytes);
    if (before != last.end() && before->second == best) continue;
    text += (text.empty() ? "" : ", from " + std::to_string(point.blocks) + " on ") + std::string(to_string(best));
    last[point.block_bytes] = best;
  }
  for (const auto& [bytes, text] : by_size)
    findings.verdict.push_back("host to device, blocks of " + format_size(bytes) + ": use " + text);
}

void judge_automatic(const std::vector<Point>& points, TransferLoad load, LinkFindings& findings) {
  const Point* worst = nullptr;
  double best_page = 0.0;
  std::uint32_t below = 0;
  for (const Point& point : points) {
    if (point.way == Way::both || point.load != load) continue;
    if (worst == nullptr || point.automatic_share() < worst->automatic_share()) worst = &point;
    below += point.automatic_share() < kAutoTarget ? 1 : 0;
    if (point.way == Way::to_device && point.block_bytes == 16 * KiB)
      best_page = std::max(best_page, link_gbps(point.bytes(), point.automatic.device_us));
  }
  if (worst == nullptr) return;
  const bool busy = load == TransferLoad::busy;
  const std::string where = busy ? "beside device memory traffic " : "";
  findings.verdict.push_back(
      where + "'auto' lost at most " + format("%.0f%%", 100.0 * (1.0 - worst->automatic_share())) +
      " to the best path (" + name_of(worst->way) + ", " + std::to_string(worst->blocks) + " blocks of " +
      format_size(worst->block_bytes) + "); " +
      (below == 0 ? "within the 5% that it may"
                  : std::to_string(below) + " of the sizes and counts miss the 5% that it may; calibrate again on an "
                                            "idle machine"));
  findings.verdict.push_back(where + "'auto' moves scattered blocks of 16K to the device at up to " +
                             format("%.1f GB/s", best_page) +
                             (busy                            ? ""
                              : best_page >= kPageTarget_gbps ? ", as PCIe 5 x16 allows"
                                                              : "; 51 are what PCIe 5 x16 allows"));
  const std::string prefix = busy ? "auto_busy_" : "auto_";
  findings.facts[prefix + "worst_share"] = worst->automatic_share();
  findings.facts[prefix + "below_target"] = below;
}

}  // namespace

void link_peaks(LinkMachine& machine, LinkFindings& findings) {
  const std::uint64_t bytes = machine.slab.memory().size() / 4;
  const TransferCase h2d{
      .choice = {.path = TransferPath::copy_engine}, .to_device = true, .block_bytes = bytes, .blocks = 1};
  TransferCase d2h = h2d;
  d2h.to_device = false;
  machine.bench.verify(h2d);
  machine.bench.verify(d2h);
  const int samples = machine.options.samples;
  const std::vector<Json> row{bytes, link_gbps(bytes, machine.bench.landed(h2d, samples).device_us),
                              link_gbps(bytes, machine.bench.landed(d2h, samples).device_us),
                              link_gbps(2 * bytes, machine.bench.both_us(h2d, samples))};
  findings.tables.push_back({.key = "peak",
                             .title = "One long copy",
                             .columns = {{"bytes", "bytes"},
                                         {"h2d_gbps", "host to device GB/s", 1},
                                         {"d2h_gbps", "device to host GB/s", 1},
                                         {"both_gbps", "both at once GB/s", 1}},
                             .rows = {row},
                             .layout = Table::Layout::pairs});
}

void link_transfers(LinkMachine& machine, LinkFindings& findings) {
  Sweep sweep(machine);
  std::vector<Point> points;
  const auto sizes = block_sizes(machine.options.quick);
  std::uint64_t done = 0;
  const auto each = [&](auto&& measure) {
    for (const std::uint64_t block_bytes : sizes) {
      machine.bar.update(done++, 5 * sizes.size(), "transfers");
      const auto most = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(machine.bench.most_blocks(block_bytes), 64 * MiB / block_bytes));
      for (const std::uint32_t blocks : counts(machine.options.quick)) {
        if (blocks <= most) points.push_back(measure(block_bytes, blocks));
      }
    }
  };
  const auto one_way = [&](TransferLoad load) {
    for (const Way way : {Way::to_device, Way::to_host})
      each([&](std::uint64_t bytes, std::uint32_t blocks) { return sweep.measure(way, load, bytes, blocks); });
  };
  for (const std::uint64_t block_bytes : sizes) {
    sweep.verify(true, block_bytes);
    sweep.verify(false, block_bytes);
  }
  one_way(TransferLoad::idle);
  each([&](std::uint64_t bytes, std::uint32_t blocks) { return sweep.measure_both(bytes, blocks); });
  {
    MemoryTraffic traffic(machine.device);
    machine.bench.run_beside(&traffic);
    one_way(TransferLoad::busy);
    machine.bench.run_beside(nullptr);
  }
  findings.tables.push_back(rates_table(points));
  findings.tables.push_back(times_table(points));
  judge_paths(points, findings);
  judge_automatic(points, TransferLoad::idle, findings);
  judge_automatic(points, TransferLoad::busy, findings);
}

}  // namespace sluice::tools
