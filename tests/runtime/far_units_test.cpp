// Far parts in units that say what they answer.
#include "runtime/far/far_units.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::runtime;

namespace {

/// Room for what is published, and a guard behind it.
struct Desk {
  Desk(std::uint32_t rows, std::uint32_t own_group, std::uint32_t head_dim, std::uint32_t drafts) {
    memory.shape = {.layers = 1, .q_heads = 2 * own_group, .kv_heads = 2, .head_dim = head_dim};
    memory.largest = memory.bucket = {.decode_rows = rows};
    memory.largest.drafts = drafts;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    out.resize(std::size_t{rows} * memory.shape.q_heads * head_dim);
    lse.resize(std::size_t{rows} * memory.shape.q_heads);
    for (float& x : out) x = normal(random);
    for (float& x : lse) x = normal(random);
    room = unit_room(memory);
    units.assign(room + kGuard, {.tag = kNone});
    memory.far_out = out.data();
    memory.far_lse = lse.data();
    memory.far_units = units.data();
  }

  static constexpr std::size_t kGuard = 8;
  ForwardMemory memory;
  std::uint64_t room = 0;
  std::vector<float> out, lse;
  std::vector<FarUnit> units;
};

}  // namespace

TEST_CASE("a list's far part is published in units of its question, all of it and nothing beside it", "[far_units]") {
  if (!stores_units()) return;
  const std::uint32_t rows = GENERATE(1u, 4u, 7u);
  const std::uint32_t group = GENERATE(1u, 3u, 4u, 8u);
  const std::uint32_t head_dim = GENERATE(32u, 64u, 96u, 128u, 256u);
  const std::uint32_t drafts = GENERATE(1u, 2u, 4u);
  CAPTURE(rows, group, head_dim, drafts);
  Desk desk(rows, group, head_dim, drafts);
  const ForwardMemory m = desk.memory.teams(drafts);
  const std::uint32_t lists = m.bucket.decode_rows * m.shape.kv_heads;
  if (!m.publishes(lists)) return;
  REQUIRE(std::uint64_t{lists} * m.list_units() <= desk.room);
  const std::uint32_t heads = m.shape.group();
  for (std::uint32_t list = 0; list < lists; ++list) {
    const std::vector<FarUnit> before = desk.units;
    const std::uint64_t asked = (std::uint64_t{1} << 32) + 40 + list;  // Of which 32 bits are written down.
    publish(m, asked, list);
    const auto first = desk.units.begin() + std::ptrdiff_t{list} * m.list_units();
    const auto last = first + m.list_units();
    std::vector<float> got;
    for (auto unit = first; unit != last; ++unit) {
      REQUIRE(unit->tag == 40 + list);
      got.insert(got.end(), unit->floats, unit->floats + FarUnit::kFloats);
    }
    std::vector<float> want(m.far_out + std::size_t{list} * heads * head_dim,
                            m.far_out + (std::size_t{list} + 1) * heads * head_dim);
    want.insert(want.end(), m.far_lse + std::size_t{list} * heads, m.far_lse + (std::size_t{list} + 1) * heads);
    want.resize(got.size());
    REQUIRE(got == want);
    const auto same = [](const FarUnit& a, const FarUnit& b) { return std::memcmp(&a, &b, sizeof(FarUnit)) == 0; };
    REQUIRE(std::equal(desk.units.begin(), first, before.begin(), same));
    REQUIRE(std::equal(last, desk.units.end(), before.end() - (desk.units.end() - last), same));
  }
}

TEST_CASE("only few units are published, and only where a kernel waits for them", "[far_units]") {
  if (!stores_units()) return;
  Desk desk(4, 4, 128, 8);
  REQUIRE(desk.memory.publishes(8));
  REQUIRE_FALSE(desk.memory.publishes(100));         // Together too many.
  REQUIRE_FALSE(desk.memory.teams(8).publishes(2));  // One list's are.
  REQUIRE(Desk(1000, 4, 128, 1).room == kMostFarUnits);
  ForwardMemory memory = desk.memory;
  memory.handover = Handover::stream;
  REQUIRE(unit_room(memory) == 0);
  memory.handover = Handover::device;
  memory.fetch_share = kWholeFetchShare;
  REQUIRE(unit_room(memory) == 0);
  memory.far_units = nullptr;
  REQUIRE_FALSE(memory.publishes(1));
}

TEST_CASE("tags are renewed without a change of what was published", "[far_units]") {
  if (!stores_units()) return;
  Desk desk(2, 4, 64, 1);
  const std::uint64_t asked = 3 * FarUnit::kRenewed;
  publish(desk.memory, asked, 1);
  const std::vector<FarUnit> before = desk.units;
  renew_tags(desk.memory, asked);
  for (std::size_t i = 0; i < desk.units.size(); ++i) {
    REQUIRE(std::equal(desk.units[i].floats, desk.units[i].floats + FarUnit::kFloats, before[i].floats));
    REQUIRE(desk.units[i].tag == (i < desk.room ? static_cast<std::uint32_t>(asked) : before[i].tag));
  }
}
