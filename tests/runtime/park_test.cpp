// Parked sequences that are damaged, foreign or forged: an Error, and nothing has changed.
#include <fcntl.h>
#include <unistd.h>

#include <functional>

#include "runtime/park/park_blocks.hpp"
#include "runtime/park/park_head.hpp"
#include "tests/runtime/parked.hpp"
#include "tests/support/park_seal.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::parked;

namespace {

runtime::ParkHead head_of(const Area& area) {
  runtime::MemorySource source(area);
  return runtime::read_head(source);
}

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

bool says(const std::string& text, const std::string& words) {
  INFO(text);
  return text.find(words) != std::string::npos;
}

/// The same body under another head.
Area with_head(const Area& area, const runtime::ParkHead& head) {
  const std::size_t body = runtime::parked_body_bytes(head_of(area).body_bytes());
  Area all = runtime::encode(head);
  all.insert(all.end(), area.end() - static_cast<std::ptrdiff_t>(body), area.end());
  return all;
}

}  // namespace

TEST_CASE("any byte of a parked sequence that is another one shows", "[park]") {
  Parked parked(12);
  REQUIRE(parked.area.size() < 3000);
  for (std::size_t i = 0; i < parked.area.size(); i += kThreadSanitized ? 7 : 1) {
    for (const std::byte flip : {std::byte{1}, std::byte{0x80}, std::byte{0xff}}) {
      CAPTURE(i, std::to_integer<int>(flip));
      parked.area[i] ^= flip;
      REQUIRE(parked.refused(parked.area) == Errc::corrupt);
      parked.area[i] ^= flip;
    }
  }
  REQUIRE(parked.engine.tokens(parked.engine.resume(parked.area, "model")) == 12);
}

TEST_CASE("a parked sequence that ends too early shows, and one that ends too late", "[park]") {
  Parked parked(12);
  for (std::size_t bytes = 0; bytes < parked.area.size(); ++bytes) {
    CAPTURE(bytes);
    REQUIRE(parked.refused(std::span(parked.area).first(bytes)) == Errc::corrupt);
  }
  Area longer = parked.area;
  for (int i = 0; i < 20; ++i) {
    longer.push_back(std::byte{0});
    REQUIRE(parked.refused(longer) == Errc::corrupt);
  }
}

TEST_CASE("a parked sequence of another length says which it has and should have", "[park]") {
  Parked parked(12);
  const std::size_t whole = parked.area.size();
  const auto refusal = [&](std::span<const std::byte> bytes) {
    return message_of([&] { (void)parked.engine.resume(bytes, "model"); });
  };
  const std::string should = "says that it has " + std::to_string(whole);
  // Down to where less than its head is left, and among its checksums.
  for (const std::size_t missing : {std::size_t{1}, std::size_t{15}, std::size_t{17}, whole - 40}) {
    CAPTURE(missing);
    const std::string text = refusal(std::span(parked.area).first(whole - missing));
    REQUIRE(says(text, "it has " + std::to_string(whole - missing) + " bytes"));
    REQUIRE(says(text, should + ": it was cut"));
  }
  Area longer = parked.area;
  longer.push_back(std::byte{0});
  REQUIRE(says(refusal(longer), should + ": something was written behind it"));
  // Lengths whose sum with that of their checksums is one of 64 bits again.
  for (const std::uint64_t lie : {~std::uint64_t{0}, std::uint64_t{1} << 63, ~std::uint64_t{0} / 65537 * 65536}) {
    CAPTURE(lie);
    Area area = parked.area;
    std::memcpy(area.data() + 16, &lie, sizeof lie);
    seal(area);
    REQUIRE(says(refusal(area), "more bytes than a file may have"));
  }
}

TEST_CASE("a parked sequence goes on with its own windows alone, however few tokens it has", "[park][windows]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t tokens = GENERATE(0u, 5u, 16u);
  const AttentionShape shape{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  using Windows = std::vector<std::uint32_t>;
  const auto with = [&](const Windows& windows) {
    EngineOptions own = options();
    own.shape = shape;
    own.windows = windows;
    return Engine(own, rig.device);
  };
  const Story story(shape, 20, 403);
  for (const Windows& parked_with : {Windows{16, 0}, Windows{}, Windows{0, 0}}) {
    Engine from = with(parked_with);
    Teller teller{.story = &story, .id = from.begin(parse_policy("full"))};
    if (tokens != 0) import_story(from, rig, teller, tokens);
    Area area(from.park_bytes(teller.id));
    (void)from.park(teller.id, area);
    for (const Windows& here : {Windows{16, 0}, Windows{}, Windows{0, 16}, Windows{24, 0}}) {
      CAPTURE(tokens, parked_with, here);
      const bool same = (parked_with == Windows{16, 0}) == (here == Windows{16, 0}) && here != Windows{0, 16} &&
                        here != Windows{24, 0};
      Engine into = with(here);
      if (same) {
        REQUIRE(into.tokens(into.resume(area)) == tokens);
      } else {
        REQUIRE(says(message_of([&] { (void)into.resume(area); }), "EngineOptions::windows has"));
      }
    }
  }
}

TEST_CASE("damage shows in every block of a parked sequence, in memory and in a file", "[park]") {
  Parked parked(9000);
  const TemporaryDirectory directory;
  const std::string file = directory.path() + "/parked";
  const std::size_t begin = runtime::encode(head_of(parked.area)).size();
  REQUIRE(parked.area.size() - begin > 4 * runtime::kParkBlock);
  parked.engine.park(parked.id, file, "model");
  const int descriptor = ::open(file.c_str(), O_RDWR);
  const std::size_t block = runtime::kParkBlock + runtime::kParkChecks;
  for (std::size_t at = begin; at < parked.area.size(); at += block) {
    for (const std::size_t in : {std::size_t{0}, std::size_t{1}, block / 4, block / 2 + 3, block - 17, block - 1}) {
      const std::size_t i = std::min(at + in, parked.area.size() - 1);
      CAPTURE(at, in);
      const std::byte damaged = parked.area[i] ^ std::byte{4};
      REQUIRE(::pwrite(descriptor, &damaged, 1, static_cast<off_t>(i)) == 1);
      REQUIRE(code_of([&] { (void)parked.engine.resume(file, "model"); }) == Errc::corrupt);
      REQUIRE(::pwrite(descriptor, &parked.area[i], 1, static_cast<off_t>(i)) == 1);
      parked.area[i] = damaged;
      REQUIRE(parked.refused(parked.area) == Errc::corrupt);
      parked.area[i] ^= std::byte{4};
    }
  }
  // Two blocks that have changed places are both whole.
  std::swap_ranges(parked.area.begin() + static_cast<std::ptrdiff_t>(begin),
                   parked.area.begin() + static_cast<std::ptrdiff_t>(begin + block),
                   parked.area.begin() + static_cast<std::ptrdiff_t>(begin + block));
  REQUIRE(parked.refused(parked.area) == Errc::corrupt);
  REQUIRE(parked.engine.tokens(parked.engine.resume(file, "model")) == 9000);
  REQUIRE(::ftruncate(descriptor, 1000) == 0);
  REQUIRE(code_of([&] { (void)parked.engine.resume(file, "model"); }) == Errc::corrupt);
  ::close(descriptor);
}

TEST_CASE("what a parked sequence says of itself is held against what there is, checksums or not", "[park]") {
  Parked parked(12);
  const runtime::ParkHead head = head_of(parked.area);
  REQUIRE(head.names == 9);
  REQUIRE(head.tail_end - head.tail_begin == 3);
  using Change = std::function<void(runtime::ParkHead&)>;
  const std::vector<Change> corrupt{
      [](auto& h) { h.shape.layers = 0; },
      [](auto& h) { h.shape.kv_heads = 3; },
      [](auto& h) { h.shape.head_dim = 0xffff'fff0u; },
      [](auto& h) { h.dtype = static_cast<DType>(3); },
      [](auto& h) { h.prompt_end = 13; },
      [](auto& h) { h.sparse = 12; },
      [](auto& h) { h.tail_begin = h.tail_end + 1; },
      [](auto& h) { h.tail_end = 13; },
      [](auto& h) { h.prefill.mode = static_cast<PrefillMode>(5); },
      [](auto& h) { h.prefill.flex.gamma = std::numeric_limits<float>::quiet_NaN(); },
      [](auto& h) { h.prefill = {.mode = PrefillMode::streaming, .streaming = {.window = 0}}; },
      [](auto& h) {
        h.prefill = {.mode = PrefillMode::minference, .minference = {.pattern = static_cast<HeadPattern>(4)}};
      },
      [](auto& h) { h.balance = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& h) {
        h.rests = {1, 2};
      },
      [](auto& h) { h.model = std::string(5000, 'm'); },
      [](auto& h) { h.passed = 8; },
      [](auto& h) {
        h.windows = {1, 2};
      },
      [](auto& h) { h.policy = std::string(70'000, ' '); },
  };
  for (std::size_t i = 0; i < corrupt.size(); ++i) {
    CAPTURE(i);
    runtime::ParkHead changed = head;
    corrupt[i](changed);
    REQUIRE(parked.refused(with_head(parked.area, changed)) == Errc::corrupt);
  }
  const std::vector<std::pair<Errc, Change>> other{
      {Errc::invalid_argument, [](auto& h) { h.policy = "no such policy"; }},
      {Errc::invalid_argument, [](auto& h) { h.policy = "history:decay=7 | top_k=3"; }},
      {Errc::unsupported, [](auto& h) { h.policy = "quest"; }},
      {Errc::invalid_argument, [](auto& h) { h.model += "!"; }},
  };
  for (const auto& [code, change] : other) {
    runtime::ParkHead changed = head;
    change(changed);
    CAPTURE(changed.policy, changed.model);
    REQUIRE(parked.refused(with_head(parked.area, changed)) == code);
  }
}

TEST_CASE("a parked sequence that lacks rows which its next token sees is refused", "[park][windows]") {
  constexpr std::uint32_t kTokens = 40, kWindow = 8;
  const EngineRig rig = engine_rig();
  EngineOptions windowed = options();
  windowed.windows = {kWindow};
  windowed.window_slack = 0;
  Engine engine(windowed, rig.device);
  const Story story(kShape, kTokens, 402);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, kTokens);
  Area area(engine.park_bytes(teller.id));
  (void)engine.park(teller.id, area);
  engine.end(teller.id);
  const auto forge = [&](std::uint32_t passed) {
    runtime::ParkHead head = head_of(area);
    head.passed = passed;
    Area forged = runtime::encode(head);
    forged.resize(forged.size() + runtime::parked_body_bytes(head.body_bytes()));
    seal(forged);
    return forged;
  };
  REQUIRE(head_of(area).passed == 32);
  for (const std::uint32_t passed : {0u, 32u, kTokens + 1 - kWindow}) engine.end(engine.resume(forge(passed)));
  for (const std::uint32_t passed : {kTokens + 2 - kWindow, kTokens - 1, kTokens}) {
    CAPTURE(passed);
    REQUIRE(code_of([&] { (void)engine.resume(forge(passed)); }) == Errc::corrupt);
  }
  // Nothing is missing where there are no windows.
  windowed.windows = {0};
  Engine whole(windowed, rig.device);
  runtime::ParkHead head = head_of(area);
  head.windows = {0};
  head.passed = 16;
  area = runtime::encode(head);
  area.resize(area.size() + runtime::parked_body_bytes(head.body_bytes()));
  seal(area);
  REQUIRE(code_of([&] { (void)whole.resume(area); }) == Errc::corrupt);
}

TEST_CASE("lengths that a parked sequence has not are refused before memory is asked for them", "[park]") {
  Parked parked(12);
  // u32 fields by their place in the head, and two of the preamble.
  for (const std::size_t at : {12u, 16u, 20u, 32u + 20u, 32u + 32u, 32u + 36u, 32u + 40u, 32u + 88u}) {
    for (const std::uint32_t lie : {0u, 1u, 13u, 257u, 0x7fff'ffffu, 0x8000'0000u, 0xffff'ffffu}) {
      CAPTURE(at, lie);
      Area area = parked.area;
      std::memcpy(area.data() + at, &lie, sizeof lie);
      if (area == parked.area) continue;
      seal(area);
      REQUIRE(parked.refused(area) == Errc::corrupt);
    }
  }
  // A later version may say anything else.
  Area area = parked.area;
  area[8] = std::byte{runtime::kParkVersion + 1};
  std::fill(area.begin() + 40, area.end(), std::byte{0x55});
  seal(std::span(area).first(kParkPreamble));
  REQUIRE(parked.refused(area) == Errc::invalid_argument);
  for (const char* const text :
       {"", "PK\3\4 an archive, and long enough to have all that a beginning has", "\x89SLUICE"}) {
    const std::string foreign = text;
    REQUIRE(parked.refused(std::as_bytes(std::span(foreign))) == Errc::corrupt);
  }
}
