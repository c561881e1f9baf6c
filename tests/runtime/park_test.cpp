// Parked sequences that are damaged, foreign or forged, and files that cannot be written: an Error, and nothing has
// changed.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <thread>

#include "runtime/park/park_blocks.hpp"
#include "runtime/park/park_head.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/park_seal.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

using Area = std::vector<std::byte>;

constexpr AttentionShape kShape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
constexpr const char* kPolicy = "lfps";

EngineOptions options() {
  EngineOptions options{.shape = kShape,
                        .page_tokens = 8,
                        .kv_dtype = DType::f32,
                        .largest = {.decode_rows = 1, .unbounded = true},
                        .sequences = 2,
                        .cpu_sequences = 2,
                        .threads = 1,
                        .pin_threads = false};
  options.host_bytes = 2400 * block_bytes(options);
  options.import_rows = 512;
  return options;
}

/// An engine, and what was parked of a sequence of it that is no more. It has names and queries.
struct Parked {
  explicit Parked(std::uint32_t tokens) : story(kShape, tokens + 10, 401), engine(options(), rig.device) {
    std::vector<std::int32_t> ids;
    for (std::uint32_t i = 0; i < 9; ++i) ids.push_back(static_cast<std::int32_t>(i));
    Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy), ids, 5)};
    import_story(engine, rig, teller, tokens, kNone, tokens - 3);
    area.resize(engine.park_bytes(teller.id, "model"));
    (void)engine.park(teller.id, area, "model");
    id = teller.id;
    before = engine.memory();
  }

  /// Why it was refused. Nothing has changed.
  Errc refused(std::span<const std::byte> bytes) {
    const Errc code = code_of([&] { (void)engine.resume(bytes, "model"); });
    const EngineMemoryUse after = engine.memory();
    REQUIRE(after.far_pages_used == before.far_pages_used);
    REQUIRE(after.far_pages_cached == before.far_pages_cached);
    REQUIRE(after.host() == before.host());
    REQUIRE(after.device() == before.device());
    return code;
  }

  EngineRig rig = engine_rig();
  Story story;
  Engine engine;
  SequenceId id;
  Area area;
  EngineMemoryUse before;
};

runtime::ParkHead head_of(const Area& area) {
  runtime::MemorySource source(area);
  return runtime::read_head(source);
}

/// The same body under another head.
Area with_head(const Area& area, const runtime::ParkHead& head) {
  const std::size_t body = runtime::parked_body_bytes(head_of(area).body_bytes());
  Area all = runtime::encode(head);
  all.insert(all.end(), area.end() - static_cast<std::ptrdiff_t>(body), area.end());
  return all;
}

std::size_t files_in(const std::string& directory) {
  const auto files = std::filesystem::directory_iterator(directory);
  return static_cast<std::size_t>(std::distance(files, {}));
}

/// No file of this process grows beyond so many bytes while this lives: what a full disk does to who writes to it.
class FileLimit {
 public:
  explicit FileLimit(std::uint64_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &old_) == 0);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = old_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~FileLimit() {
    (void)::setrlimit(RLIMIT_FSIZE, &old_);
    (void)std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

}  // namespace

TEST_CASE("any byte of a parked sequence that is another one shows", "[park]") {
  Parked parked(12);
  REQUIRE(parked.area.size() < 3000);
  for (std::size_t i = 0; i < parked.area.size(); ++i) {
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
      [](auto& h) { h.prefill.mode = static_cast<PrefillMode>(3); },
      [](auto& h) { h.prefill.flex.gamma = std::numeric_limits<float>::quiet_NaN(); },
      [](auto& h) { h.balance = std::numeric_limits<double>::quiet_NaN(); },
      [](auto& h) {
        h.rests = {1, 2};
      },
      [](auto& h) { h.model = std::string(5000, 'm'); },
      [](auto& h) { h.passed = 8; },
      [](auto& h) { h.windows = {1, 2}; },
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

TEST_CASE("a file that cannot be written leaves nothing behind, and the one that was there", "[park]") {
  Parked parked(9000);
  const TemporaryDirectory directory;
  const std::string file = directory.path() + "/parked";
  const auto park = [&](const std::string& to) { return code_of([&] { parked.engine.park(parked.id, to, "model"); }); };
  for (const std::uint64_t most : {0u, 1u, 100'000u, 300'000u, 1'000'000u}) {
    const FileLimit limit(most);
    REQUIRE(park(file) == Errc::io);
    REQUIRE(files_in(directory.path()) == 0);
  }
  parked.engine.park(parked.id, file, "model");
  struct stat status {};
  REQUIRE(::stat(file.c_str(), &status) == 0);
  REQUIRE((status.st_mode & 0777) == 0600);
  {
    const FileLimit limit(300'000);
    REQUIRE(park(file) == Errc::io);
  }
  REQUIRE(files_in(directory.path()) == 1);
  REQUIRE(parked.engine.tokens(parked.engine.resume(file, "model")) == 9000);
  REQUIRE(park(directory.path() + "/none/parked") == Errc::io);
  REQUIRE(park("") == Errc::io);
  REQUIRE(park(directory.path()) == Errc::invalid_argument);
  REQUIRE(park("/dev/full") == Errc::invalid_argument);
  REQUIRE(parked.engine.tokens(parked.id) == 9000);
}

TEST_CASE("a file that cannot be read is named", "[park]") {
  Parked parked(12);
  const TemporaryDirectory directory;
  const auto resume = [&](const std::string& from) {
    return code_of([&] { (void)parked.engine.resume(from, "model"); });
  };
  REQUIRE(resume(directory.path() + "/none") == Errc::not_found);
  REQUIRE(resume(directory.path()) == Errc::invalid_argument);
  REQUIRE(resume("/dev/zero") == Errc::invalid_argument);
  const std::string pipe = directory.path() + "/pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE(resume(pipe) == Errc::invalid_argument);
  directory.write("empty", "");
  REQUIRE(resume(directory.path() + "/empty") == Errc::corrupt);
}

TEST_CASE("a device that fails while a sequence is resumed costs that sequence alone", "[park]") {
  Parked parked(40);
  auto& device = static_cast<cpu::HostDevice&>(*parked.rig.device);
  int failures = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    device.inject({.seed = seed, .fail_verb = 0.5});
    try {
      const SequenceId id = parked.engine.resume(parked.area, "model");
      device.inject({});
      REQUIRE(parked.engine.tokens(id) == 40);
      parked.engine.end(id);
    } catch (const Error& error) {
      device.inject({});
      REQUIRE(error.code() == Errc::device);
      ++failures;
    }
    REQUIRE(parked.engine.memory().far_pages_used == parked.before.far_pages_used);
  }
  REQUIRE(failures > 0);
  REQUIRE(failures < 20);
}

TEST_CASE("a device that is late while a sequence is resumed keeps its blocks until it is through", "[park]") {
  using namespace std::chrono_literals;
  Parked parked(40);
  EngineOptions impatient = options();
  impatient.timeout = 100ms;
  Engine engine(impatient, parked.rig.device);
  const EngineMemoryUse before = engine.memory();
  auto& device = static_cast<cpu::HostDevice&>(*parked.rig.device);
  int late = 0;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    device.inject({.seed = seed, .max_delay = 2s});
    try {
      engine.end(engine.resume(parked.area, "model"));
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::timeout);
      REQUIRE(engine.memory().far_pages_used > before.far_pages_used);
      ++late;
    }
    device.inject({});
    // The next one has a stream and blocks of its own; the others come back when the device is through.
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    do {
      const SequenceId id = engine.resume(parked.area, "model");
      REQUIRE(engine.tokens(id) == 40);
      engine.end(id);
      std::this_thread::sleep_for(1ms);
    } while (engine.memory().far_pages_used != before.far_pages_used && std::chrono::steady_clock::now() < deadline);
    REQUIRE(engine.memory().far_pages_used == before.far_pages_used);
  }
  REQUIRE(late > 0);
}
