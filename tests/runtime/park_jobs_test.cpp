// Sequences that are parked and resumed by several threads, and one of them that is late.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "runtime/background/borrowing_job.hpp"
#include "runtime/park/park_body.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kPrompt = 8000;  // 16 MiB of f32: 64 blocks of a parked body.

/// What threads do before each piece of a job: the first waits for a second one, so that none does all of them.
struct Hook {
  const std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  std::set<std::thread::id> seen;  ///< guarded by mutex
  std::atomic<bool> holds{false};  ///< the next that is not the caller
  std::atomic<bool> held{false}, open{false};
  std::atomic<bool> patient{true};  ///< until nobody came

  void pass() {
    const bool mine = std::this_thread::get_id() == caller;
    {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    if (!mine && holds.exchange(false)) {
      held = true;
      while (!open) std::this_thread::sleep_for(1ms);
      held = false;
      return;
    }
    const Deadline deadline = deadline_after(20s);
    while (patient && ((mine && holds) || threads() < 2)) {
      std::this_thread::sleep_for(1ms);
      if (RunClock::now() >= deadline) patient = false;
    }
  }
  [[nodiscard]] std::size_t threads() {
    const std::lock_guard lock(mutex);
    return seen.size();
  }
};

EngineOptions options_for(const EngineRig& rig, const std::shared_ptr<Hook>& hook) {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = rig.kv_dtype,
                        .policies = {parse_policy("full")},
                        .threads = 3,
                        .pin_threads = false};
  options.host_bytes = 1200 * block_bytes(options);
  options.import_rows = 500;
  options.before_answer = [hook] { hook->pass(); };
  return options;
}

Teller told(Engine& engine, const EngineRig& rig, const Story& story) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, kPrompt);
  return teller;
}

}  // namespace

TEST_CASE("several threads park a sequence and resume it, in memory and in a file", "[park][jobs]") {
  const EngineRig rig = engine_rig();
  const auto hook = std::make_shared<Hook>();
  const Story story(kShape, kPrompt + 4, 501);
  Engine engine(options_for(rig, hook), rig.device);
  Teller teller = told(engine, rig, story);
  std::vector<std::byte> area(engine.park_bytes(teller.id));
  hook->seen.clear();
  REQUIRE(engine.park(teller.id, area) == area.size());
  REQUIRE(hook->threads() > 1);
  const TemporaryDirectory directory;
  const std::string file = directory.path() + "/parked";
  hook->seen.clear();
  engine.park(teller.id, file);
  REQUIRE(hook->threads() > 1);
  hook->seen.clear();
  Teller back{.story = &story, .id = engine.resume(file), .at = teller.at};
  REQUIRE(hook->threads() > 1);
  // What was parked in a file and in memory is the same, and so is what is parked of what came back.
  std::vector<std::byte> again(engine.park_bytes(back.id));
  (void)engine.park(back.id, again);
  REQUIRE(again == area);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto want = run_forward(engine, rig, tensors, {&teller});
  REQUIRE(run_forward(engine, rig, tensors, {&back}) == want);
}

TEST_CASE("a sequence of several turns of loading comes back whole, and its damage is found", "[park][jobs]") {
  constexpr AttentionShape kLarge{.layers = 4, .q_heads = 4, .kv_heads = 4, .head_dim = 128};
  const EngineRig rig = engine_rig();
  // 64 MiB a turn: two and a half of them, or one and a quarter.
  constexpr std::uint32_t kBytes = (kThreadSanitized ? 80u : 160u) << 20;
  const std::uint32_t tokens = kBytes / (2 * kLarge.layers * kLarge.kv_heads * kLarge.head_dim) /
                               static_cast<std::uint32_t>(bytes_of(rig.kv_dtype));
  EngineOptions options{.shape = kLarge,
                        .kv_dtype = rig.kv_dtype,
                        .policies = {parse_policy("full")},
                        .threads = 3,
                        .pin_threads = false};
  options.largest.max_tokens = (tokens / 16 + 2) * 16;
  options.host_bytes = 2 * (options.largest.max_tokens / options.page_tokens + 1) * block_bytes(options);
  options.import_rows = 500;
  const Story story(kLarge, tokens, 503);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, tokens);
  std::vector<std::byte> area(engine.park_bytes(teller.id));
  REQUIRE(area.size() > kBytes);
  (void)engine.park(teller.id, area);
  const SequenceId back = engine.resume(area);
  std::vector<std::byte> again(engine.park_bytes(back));
  (void)engine.park(back, again);
  REQUIRE(again == area);
  engine.end(back);
  area[area.size() - (20u << 20)] ^= std::byte{1};
  REQUIRE(code_of([&] { (void)engine.resume(area); }) == Errc::corrupt);
}

TEST_CASE("a thread that is late with a part of a sequence touches nothing of the caller's any more",
          "[park][jobs][lost]") {
  const EngineRig rig = engine_rig();
  const auto hook = std::make_shared<Hook>();
  const Story story(kShape, kPrompt + 4, 502);
  EngineOptions options = options_for(rig, hook);
  options.timeout = 1s;
  Engine engine(options, rig.device);
  Teller teller = told(engine, rig, story);
  const auto late = [&](const auto& call) {
    hook->open = false;
    hook->holds = true;
    REQUIRE(code_of(call) == Errc::timeout);
    REQUIRE(hook->held);
  };
  const auto comes_back = [&] {
    hook->open = true;
    while (hook->held) std::this_thread::sleep_for(1ms);
  };
  std::vector<std::byte> area(engine.park_bytes(teller.id));
  late([&] { (void)engine.park(teller.id, area); });
  const std::vector<std::byte> changed(area.size(), std::byte{0xaa});
  area = changed;
  comes_back();
  std::this_thread::sleep_for(50ms);
  REQUIRE(area == changed);
  REQUIRE(engine.park(teller.id, area) == area.size());
  engine.end(teller.id);
  // Blocks of a sequence that could not be resumed are others' at once, and stay as these make them.
  const Story story_of_other(kShape, kPrompt + 4, 503);
  Teller other = told(engine, rig, story_of_other);
  std::vector<std::byte> area_of_other(engine.park_bytes(other.id));
  REQUIRE(engine.park(other.id, area_of_other) == area_of_other.size());
  engine.end(other.id);
  late([&] { (void)engine.resume(area); });
  REQUIRE(engine.memory().far_pages_used == 0);
  const SequenceId back = engine.resume(area_of_other);
  REQUIRE(hook->held);
  comes_back();
  std::this_thread::sleep_for(50ms);
  std::vector<std::byte> again(engine.park_bytes(back));
  (void)engine.park(back, again);
  REQUIRE(again == area_of_other);
}

TEST_CASE("bytes of a body are found where its rows lie, in turns, in pages and nowhere", "[park]") {
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    runtime::ParkBody body;
    std::vector<std::byte> memory(20'000);
    std::vector<std::byte*> naive;  // Of each byte of the body.
    std::vector<std::vector<std::uint32_t>> frames;
    frames.reserve(8);
    std::size_t at = 0;
    for (std::uint32_t parts = random.below(6); parts != 0; --parts) {
      const std::uint32_t row_bytes = 1 + random.below(9), turn = 1 + random.below(7);
      const std::uint32_t first = random.below(20), rows = random.below(40);
      runtime::ParkBody::Part part{.row_bytes = row_bytes, .rows = rows, .first = first, .turn = turn};
      const std::uint32_t kind = random.below(3);
      if (kind != 0) part.base = memory.data() + at;
      if (kind == 2) {
        std::vector<std::uint32_t> of((first + rows) / turn + 1);
        std::iota(of.begin(), of.end(), 0u);
        for (std::size_t i = of.size(); i > 1; --i)
          std::swap(of[i - 1], of[random.below(static_cast<std::uint32_t>(i))]);
        frames.push_back(std::move(of));
        part.frames = frames.back().data();
        part.frame_bytes = std::uint64_t{turn} * row_bytes + 3;
        at += frames.back().size() * part.frame_bytes;
      } else if (kind == 1) {
        part.rows = std::min(rows, turn);  // No two of them in one place.
        at += std::uint64_t{turn} * row_bytes;
      }
      for (std::uint64_t row = first; row < first + part.rows; ++row) {
        for (std::uint32_t i = 0; i < row_bytes; ++i) {
          const std::uint64_t frame = kind == 2 ? part.frames[row / turn] : 0;
          naive.push_back(kind == 0 ? nullptr : part.base + frame * part.frame_bytes + row % turn * row_bytes + i);
        }
      }
      body.add(part);
    }
    REQUIRE(at <= memory.size());
    REQUIRE(body.bytes() == naive.size());
    std::vector<std::byte> in(naive.size());
    for (std::byte& byte : in) byte = static_cast<std::byte>(random.below(256));
    for (std::size_t begin = 0; begin < in.size();) {
      const std::size_t some = std::min<std::size_t>(1 + random.below(60), in.size() - begin);
      body.scatter(begin, std::span(in).subspan(begin, some));
      begin += some;
    }
    bool same = true;
    for (std::size_t i = 0; i < naive.size(); ++i) same = same && (naive[i] == nullptr || *naive[i] == in[i]);
    REQUIRE(same);
    if (std::ranges::find(naive, static_cast<std::byte*>(nullptr)) != naive.end()) continue;
    std::vector<std::byte> out(naive.size());
    for (std::size_t begin = 0; begin < out.size();) {
      const std::size_t some = std::min<std::size_t>(1 + random.below(60), out.size() - begin);
      body.gather(begin, std::span(out).subspan(begin, some));
      begin += some;
    }
    REQUIRE(out == in);
  }
}

TEST_CASE("a piece that is late and ends well counts, one that ends badly or not at all does not", "[job]") {
  enum class End { well, badly, unused };
  const End end = GENERATE(End::well, End::badly, End::unused);
  constexpr auto kLate = 300ms;  // Behind a caller that waits for a millisecond.
  std::atomic<bool> begun{false}, awaits{false}, gave_up{false};
  const auto until = [](const std::atomic<bool>& set) {
    while (!set) std::this_thread::sleep_for(1ms);
  };
  std::shared_ptr<runtime::Job> job;
  runtime::BorrowingJob borrowing(
      [&](std::uint32_t pieces, std::function<void(std::uint32_t)> piece) {
        if (end == End::unused)
          piece = [&, piece = std::move(piece)](std::uint32_t i) {
            begun = true;
            until(gave_up);  // Then it looks whether there is something left to use.
            piece(i);
          };
        return job = std::make_shared<runtime::Job>(pieces, std::move(piece));
      },
      1,
      [&](std::uint32_t) {
        begun = true;
        if (end != End::unused) until(awaits);
        std::this_thread::sleep_for(kLate);
        if (end == End::badly) throw Error(Errc::io, "the disk is full");
      });
  std::thread worker([&] { (void)job->work(); });
  until(begun);
  awaits = true;
  const bool done = borrowing.await(1ms);
  gave_up = true;
  worker.join();
  REQUIRE(done == (end == End::well));
}

TEST_CASE("what is lent is waited for while it is used, and not used later", "[job]") {
  runtime::Loan loan;
  std::atomic<bool> uses{false}, done{false}, ended{false}, early{false};
  std::thread user([&] {
    const runtime::Loan::Use use(loan);
    uses = static_cast<bool>(use);
    while (!done) std::this_thread::sleep_for(1ms);
    early = ended.load();
  });
  while (!uses) std::this_thread::yield();
  std::thread owner([&] {
    loan.end();
    ended = true;
  });
  std::this_thread::sleep_for(20ms);
  REQUIRE_FALSE(ended);
  done = true;
  user.join();
  owner.join();
  REQUIRE_FALSE(early);
  REQUIRE_FALSE(static_cast<bool>(runtime::Loan::Use(loan)));
}
