// Calls of the C interface: three engines, each twice, on threads of their own that make the same calls at the
// same time, while another thread asks for statistics. Both of a kind see the same, bit by bit, and what they see is
// held against float64.

#include <array>
#include <barrier>
#include <thread>

#include "tests/fuzz/abi_world.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace sluice::test;
using namespace sluice::test::abi;

namespace {

/// Plays what it is given on a thread of its own.
class Player {
 public:
  explicit Player(World::Kind kind) : world_(kind), thread_([this] { run(); }) {}
  ~Player() {
    stop_ = true;
    turn_.arrive_and_wait();
    thread_.join();
  }
  Player(const Player&) = delete;
  Player& operator=(const Player&) = delete;

  void begin(std::string_view input) {
    input_ = input;
    turn_.arrive_and_wait();
  }
  void await() { turn_.arrive_and_wait(); }
  [[nodiscard]] const World& world() const noexcept { return world_; }

 private:
  void run() {
    for (;;) {
      turn_.arrive_and_wait();
      if (stop_) return;
      world_.play(input_);
      turn_.arrive_and_wait();
    }
  }

  World world_;
  std::string_view input_;
  std::barrier<> turn_{2};
  bool stop_ = false;
  std::thread thread_;
};

struct Pair {
  explicit Pair(World::Kind kind) : one(kind), other(kind) {}
  ~Pair() { std::fprintf(stderr, "abi: %llu calls\n", 2ull * one.calls()); }
  World one;
  Player other;
};

/// As any thread may at any time.
void ask(const World& world) {
  sluice_stats stats{};
  stats.struct_size = sizeof stats;
  FUZZ_REQUIRE(sluice_engine_stats(world.engine(), &stats) == SLUICE_OK);
}

/// Asks both engines of a pair for as long as it lives.
class Asker {
 public:
  explicit Asker(const Pair& pair)
      : thread_([&pair](const std::stop_token& stop) {
          while (!stop.stop_requested()) {
            ask(pair.one);
            ask(pair.other.world());
            std::this_thread::yield();
          }
        }) {}

 private:
  std::jthread thread_;
};

Pair& pair_of(std::uint32_t kind) {
  static std::array<Pair, 3> pairs{Pair(World::Kind::plain), Pair(World::Kind::windows), Pair(World::Kind::streams)};
  return pairs[kind % pairs.size()];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  if (text.empty()) return 0;
  Pair& pair = pair_of(static_cast<unsigned char>(text[0]));
  pair.other.begin(text.substr(1));
  if (static_cast<unsigned char>(text[0]) >= 192) {  // Not always: a thread takes as long as several calls.
    const Asker asker(pair);
    pair.one.play(text.substr(1));
  } else {
    pair.one.play(text.substr(1));
  }
  pair.other.await();
  FUZZ_REQUIRE(pair.one.seen() == pair.other.world().seen());
  return 0;
}
