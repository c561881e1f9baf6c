// Threads, of the caller and of an engine, by the C interface.
#include <sched.h>

#include <thread>

#include "tests/capi/small_engine.hpp"
#include "tests/support/no_threads.hpp"

using namespace sluice::test::capi;

TEST_CASE("each thread has its own last error", "[capi][errors]") {
  const SmallEngine small;
  std::uint32_t tokens = 0;
  CHECK(sluice_engine_tokens(small.engine, 111, &tokens) == SLUICE_NOT_FOUND);
  std::string fresh = "?", theirs;
  std::thread([&] {
    fresh = sluice_last_error();
    (void)sluice_engine_tokens(small.engine, 222, &tokens);
    theirs = sluice_last_error();
  }).join();
  CHECK(fresh.empty());
  CHECK(theirs.find("222") != std::string::npos);
  CHECK(std::string(sluice_last_error()).find("111") != std::string::npos);
  require_ok(sluice_engine_tokens(small.engine, small.sequence, &tokens));
  CHECK(std::string(sluice_last_error()).find("111") != std::string::npos);  // Calls that succeed leave it alone.
}

TEST_CASE("an engine that gets no thread is out of capacity, and one that gets it later runs", "[capi][errors]") {
  const auto options = small_options();
  sluice_engine* engine = nullptr;
  {
    const sluice::test::NoThreads none;
    check_fails([&] { return sluice_engine_create(&options, &engine); }, SLUICE_OUT_OF_CAPACITY,
                {"no thread left", "use fewer threads", "ulimit -u"});
  }
  CHECK(engine == nullptr);
  const SmallEngine small;
  small.forward();
}

TEST_CASE("a thread of C is bound to the core that is left to it, or told why not", "[capi][core_shares]") {
  auto options = small_options();
  options.threads = 0;
  const EnginePointer owner = create(options);
  const auto cores = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
  };
  sluice_status pinned = SLUICE_INTERNAL, unpinned = SLUICE_INTERNAL;
  std::string why;
  int before = 0, bound = 0, after = 0;
  std::thread([&] {  // What this test's own thread may use stays.
    before = cores();
    pinned = sluice_engine_pin_caller(owner.get());
    why = sluice_last_error();
    bound = cores();
    unpinned = sluice_engine_unpin_caller(owner.get());
    after = cores();
  })
      .join();
  CHECK(unpinned == SLUICE_OK);
  CHECK(after == before);
  if (pinned == SLUICE_UNSUPPORTED) {
    CHECK(why.find("pin_caller: ") == 0);
    CHECK(bound == before);
    return;
  }
  CHECK(pinned == SLUICE_OK);
  CHECK(bound < before);
}
