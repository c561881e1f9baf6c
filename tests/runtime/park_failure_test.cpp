// Sequences are parked in files that cannot be written, and resumed from files that cannot be read or by a device that
// fails or is late: an Error, and nothing else is lost.
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "tests/runtime/comes.hpp"
#include "tests/runtime/parked.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::parked;

namespace {

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

/// Its newest stream stands still when it is told to.
class StandingDevice final : public ForwardingDevice {
 public:
  explicit StandingDevice(std::shared_ptr<Device> inner) : ForwardingDevice(std::move(inner)) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return inner_->forward_verbs(); }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    auto stream = inner_->create_stream(name);
    newest_ = stream.get();
    return stream;
  }
  /// What is enqueued on it from now on waits for `go_on`.
  void stand() { newest_->wait(flag_, ++turn_); }
  void go_on() noexcept { flag_.signal(turn_); }

 private:
  Flag flag_;
  std::uint64_t turn_ = 0;
  Stream* newest_ = nullptr;
};

}  // namespace

TEST_CASE("a file that cannot be written leaves nothing behind, and the one that was there", "[park]") {
  Parked parked(9000);
  const TemporaryDirectory directory;
  const std::string file = directory.file("parked");
  const auto park = [&](const std::string& to) { return code_of([&] { parked.engine.park(parked.id, to, "model"); }); };
  for (const std::uint64_t most : {0u, 1u, 100'000u, 300'000u, 1'000'000u}) {
    const FileLimit limit(most);
    REQUIRE(park(file) == Errc::io);
    REQUIRE(directory.entries() == 0);
  }
  parked.engine.park(parked.id, file, "model");
  struct stat status {};
  REQUIRE(::stat(file.c_str(), &status) == 0);
  REQUIRE((status.st_mode & 0777) == 0600);
  {
    const FileLimit limit(300'000);
    REQUIRE(park(file) == Errc::io);
  }
  REQUIRE(directory.entries() == 1);
  REQUIRE(parked.engine.tokens(parked.engine.resume(file, "model")) == 9000);
  REQUIRE(park(directory.file("none/parked")) == Errc::io);
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
  REQUIRE(resume(directory.file("none")) == Errc::not_found);
  REQUIRE(resume(directory.path()) == Errc::invalid_argument);
  REQUIRE(resume("/dev/zero") == Errc::invalid_argument);
  const std::string pipe = directory.file("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE(resume(pipe) == Errc::invalid_argument);
  REQUIRE(resume(directory.write("empty", "")) == Errc::corrupt);
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
  const auto device = std::make_shared<StandingDevice>(parked.rig.device);
  EngineOptions impatient = options();
  impatient.timeout = 300ms;
  Engine engine(impatient, device);
  const std::uint64_t before = engine.memory().far_pages_used;
  const auto resume = [&] {
    const SequenceId id = engine.resume(parked.area, "model");
    REQUIRE(engine.tokens(id) == 40);
    engine.end(id);
  };
  resume();  // Its stream remains.
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    device->stand();
    REQUIRE(code_of(resume) == Errc::timeout);
    const std::uint64_t late = engine.memory().far_pages_used;
    REQUIRE(late > before);
    // The next one has a stream and blocks of its own; the others come back when the device is through.
    resume();
    REQUIRE(engine.memory().far_pages_used == late);
    device->go_on();
    REQUIRE(comes([&] { return engine.memory().far_pages_used == before; }));
  }
}

TEST_CASE("blocks that a late device has kept are anybody's once it is through, whoever asks first", "[park]") {
  using namespace std::chrono_literals;
  const std::string first = GENERATE(as<std::string>{}, "can_admit", "import", "plan", "resume");
  CAPTURE(first);
  Parked parked(40);
  const auto device = std::make_shared<StandingDevice>(parked.rig.device);
  EngineOptions narrow = options();
  narrow.timeout = 300ms;
  narrow.largest.prefill_rows = 40;
  narrow.largest.prefills = 1;
  narrow.host_bytes = 6 * block_bytes(narrow);  // One more than the sequence has.
  Engine engine(narrow, device);
  engine.end(engine.resume(parked.area, "model"));
  device->stand();
  REQUIRE(code_of([&] { (void)engine.resume(parked.area, "model"); }) == Errc::timeout);
  const SequenceId id = engine.begin(parse_policy("full:near=0"));
  const PlanItem item{.sequence = id, .tokens = 40, .prefill = true};
  const auto has_room = [&] {
    if (first == "can_admit") return engine.can_admit(40);
    try {
      Teller teller{.story = &parked.story, .id = id};
      if (first == "import") import_story(engine, parked.rig, teller, 40);
      if (first == "plan") engine.cancel(engine.plan({&item, 1}, engine.options().largest, parked.rig.stream));
      if (first == "resume") (void)engine.resume(parked.area, "model");
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::out_of_capacity);
      return false;
    }
    return true;
  };
  REQUIRE_FALSE(has_room());
  device->go_on();
  REQUIRE(comes(has_room));
}

TEST_CASE("a sequence is resumed after a plan was refused, whether the block that it copied is held or free",
          "[park]") {
  Parked parked(12);  // Of its second page 4 tokens of 8: who shares that and goes on gets a block of its own.
  const auto device = std::make_shared<RefusingDevice>(parked.rig.device);
  EngineOptions three = options();
  three.sequences = 3;
  for (const bool held : {true, false}) {
    CAPTURE(held);
    Engine engine(three, device);
    const SequenceId parent = engine.resume(parked.area, "model");
    const std::uint64_t alone = engine.memory().far_pages_used;
    const SequenceId child = engine.fork(parent, 12, parse_policy("full:near=0"));
    const PlanItem item{.sequence = child};
    device->verbs.refuses = true;
    REQUIRE(code_of([&] {
              (void)engine.plan({&item, 1}, engine.options().largest, parked.rig.stream);
            }) == Errc::device);
    REQUIRE(engine.memory().far_pages_used > alone);
    if (!held) engine.end(child);
    const SequenceId again = engine.resume(parked.area, "model");
    REQUIRE(engine.tokens(again) == 12);
    engine.end(again);
    if (held) engine.end(child);
    REQUIRE(engine.memory().far_pages_used == alone);
  }
}
