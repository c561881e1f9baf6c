#include "gpu/device/path_chooser.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

/// Scattered host to device on one H200, PCIe 5 x16, GB/s by block size; the other direction is alike.
struct Rate {
  std::uint64_t block_bytes;
  double copy_engine;
  double batch;
  double gather;
};
constexpr std::array<Rate, 7> kRates{{{4 * KiB, 1.4, 3.0, 27.1},
                                      {8 * KiB, 2.7, 4.1, 48.8},
                                      {16 * KiB, 5.1, 5.0, 51.2},
                                      {32 * KiB, 9.2, 32.6, 51.2},
                                      {64 * KiB, 15.8, 43.9, 51.2},
                                      {128 * KiB, 24.0, 48.8, 51.2},
                                      {512 * KiB, 39.0, 53.0, 51.2}}};
/// Two, as times grow along a line in between and beyond.
constexpr std::array<std::uint32_t, 2> kCounts{8, 4096};
/// Of the gather kernel's rate beside a kernel that saturates the device's memory. The other paths keep theirs.
constexpr double kBusyGather = 0.52;
/// What a batch costs before its first byte: one copy, one batch call, one kernel that reads descriptors first.
constexpr double kCopyFloor_us = 4.1;
constexpr double kBatchFloor_us = 8.0;
constexpr double kGatherFloor_us = 7.0;

double time_us(double floor_us, std::uint64_t bytes, double gbps) {
  return floor_us + static_cast<double>(bytes) / gbps * 1e-3;
}

std::shared_ptr<const TransferProfile> make_default() {
  auto profile = std::make_shared<TransferProfile>();
  for (const Rate& rate : kRates) {
    for (const std::uint32_t blocks : kCounts) {
      const std::uint64_t bytes = rate.block_bytes * blocks;
      const auto add = [&](TransferPath path, TransferLoad load, double us) {
        for (const bool to_device : {true, false})
          profile->samples.push_back({.path = path,
                                      .load = load,
                                      .to_device = to_device,
                                      .block_bytes = rate.block_bytes,
                                      .blocks = blocks,
                                      .host_us = path == TransferPath::copy_engine ? us : kCopyFloor_us,
                                      .device_us = us});
      };
      for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
        const double share = load == TransferLoad::busy ? kBusyGather : 1.0;
        add(TransferPath::copy_engine, load, time_us(kCopyFloor_us, bytes, rate.copy_engine));
        add(TransferPath::batch, load, time_us(kBatchFloor_us, bytes, rate.batch));
        add(TransferPath::gather, load, time_us(kGatherFloor_us, bytes, share * rate.gather));
      }
    }
  }
  return profile;
}

/// On the line between two points, or beyond the ends with the slope there, which is never steeper than in
/// proportion: more bytes take no less time and at most as much more.
double along(double x, std::pair<double, double> a, std::pair<double, double> b) {
  const std::pair<double, double>& near = x > b.first ? b : a;
  const bool inside = x >= a.first && x <= b.first;
  const double width = b.first - a.first;
  const double proportion = near.second / near.first;
  double slope = width > 0.0 ? (b.second - a.second) / width : proportion;
  if (inside) return near.second + slope * (x - near.first);
  slope = std::clamp(slope, 0.0, proportion);
  // What rounding leaves of a proportion may be less than nothing.
  return std::max(near.second + slope * (x - near.first), 0.0);
}

/// Position of the segment of `items` that holds x, or the one nearest to it. At least one entry.
template <class Items, class Key>
std::pair<std::size_t, std::size_t> segment(const Items& items, double x, Key&& key) {
  std::size_t above = 0;
  while (above < items.size() && key(items[above]) < x) ++above;
  if (items.size() == 1) return {0, 0};
  above = std::clamp<std::size_t>(above, 1, items.size() - 1);
  return {above - 1, above};
}

double on_curve(const std::vector<std::pair<double, double>>& points, double blocks) {
  const auto [a, b] = segment(points, blocks, [](const auto& point) { return point.first; });
  return along(blocks, points[a], points[b]);
}

void validate_thread_blocks(const char* name, std::uint32_t blocks) {
  if (blocks == 0 || blocks > 65'535)
    throw Error(Errc::invalid_argument, std::string("transfer profile: ") + name + " is " + std::to_string(blocks) +
                                            "; let it be from 1 to 65535");
}

void validate(const TransferProfile& profile) {
  for (std::size_t i = 0; i < profile.samples.size(); ++i) {
    const TransferSample& sample = profile.samples[i];
    const bool sane = sample.path != TransferPath::automatic && sample.path <= TransferPath::staged &&
                      sample.load <= TransferLoad::busy && sample.block_bytes > 0 && sample.blocks > 0 &&
                      sample.device_us > 0.0 && sample.device_us <= kMostTransfer_us;  // NaN is neither
    if (!sane)
      throw Error(Errc::invalid_argument,
                  "transfer profile: sample " + std::to_string(i) + " (" + to_string(sample.path) + ", " +
                      std::to_string(sample.blocks) + " blocks of " + std::to_string(sample.block_bytes) +
                      " bytes) needs a path of its own, a size and a positive time; measure the profile again");
  }
  validate_thread_blocks("gather_blocks", profile.gather_blocks);
  validate_thread_blocks("busy_gather_blocks", profile.busy_gather_blocks);
}

}  // namespace

std::shared_ptr<const TransferProfile> default_profile() {
  static const auto profile = make_default();
  return profile;
}

PathChooser::PathChooser(std::shared_ptr<const TransferProfile> profile)
    : profile_(profile ? std::move(profile) : default_profile()) {
  validate(*profile_);
  for (const TransferSample& sample : profile_->samples) {
    Surface& surface = directions_[index(sample.load, sample.to_device)][static_cast<std::size_t>(sample.path)];
    const auto bytes = static_cast<double>(sample.block_bytes);
    auto curve = std::find_if(surface.begin(), surface.end(), [&](const Curve& c) { return c.block_bytes == bytes; });
    if (curve == surface.end()) curve = surface.insert(surface.end(), Curve{.block_bytes = bytes, .points = {}});
    curve->points.emplace_back(static_cast<double>(sample.blocks), sample.device_us);
  }
  for (Direction& direction : directions_) {
    for (Surface& surface : direction) {
      std::sort(surface.begin(), surface.end(),
                [](const Curve& a, const Curve& b) { return a.block_bytes < b.block_bytes; });
      for (Curve& curve : surface) std::sort(curve.points.begin(), curve.points.end());
    }
  }
  for (const bool to_device : {false, true}) {
    Direction& busy = directions_[index(TransferLoad::busy, to_device)];
    // All paths or none: a path's time on an idle device says nothing beside another's on a busy one.
    if (std::all_of(busy.begin(), busy.end(), [](const Surface& surface) { return surface.empty(); }))
      busy = directions_[index(TransferLoad::idle, to_device)];
  }
}

double PathChooser::device_us(TransferPath path, const Batch& batch) const noexcept {
  const Surface& known = directions_[index(batch.load, batch.to_device)][static_cast<std::size_t>(path)];
  if (known.empty() || batch.blocks == 0 || batch.block_bytes == 0) return std::numeric_limits<double>::infinity();
  const auto bytes = static_cast<double>(batch.block_bytes);
  const auto blocks = static_cast<double>(batch.blocks);
  const auto [a, b] = segment(known, bytes, [](const Curve& curve) { return curve.block_bytes; });
  return along(bytes, {known[a].block_bytes, on_curve(known[a].points, blocks)},
               {known[b].block_bytes, on_curve(known[b].points, blocks)});
}

TransferPath PathChooser::choose(const Batch& batch) const noexcept {
  TransferPath best = TransferPath::copy_engine;
  if (batch.blocks <= 1) return best;
  double best_us = device_us(best, batch);
  for (const TransferPath path : {TransferPath::batch, TransferPath::gather, TransferPath::staged}) {
    if (path == TransferPath::staged && !(batch.to_device && batch.may_stage)) continue;
    const double us = device_us(path, batch);
    if (us < best_us) {
      best = path;
      best_us = us;
    }
  }
  return best;
}

}  // namespace sluice::gpu
