// A gate that a stream waits for, and who opens it.
#include "runtime/far/answer_watchdog.hpp"

#include <atomic>
#include <thread>

#include "runtime/far/mailbox.hpp"
#include "tests/runtime/comes.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/no_threads.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

/// As a device asks.
void ask(ForwardMailbox& mailbox, std::uint64_t asked) {
  std::atomic_ref(mailbox.gate.word).store(ForwardGate::closed(asked), std::memory_order_relaxed);
  std::atomic_ref(mailbox.question.asked).store(asked, std::memory_order_release);
}

std::uint64_t gate(const ForwardMailbox& mailbox) { return look(mailbox.gate.word); }

}  // namespace

TEST_CASE("a gate is open as long as nothing was asked", "[watchdog]") {
  const ForwardMailbox mailbox{};
  REQUIRE((mailbox.gate.word & ForwardGate::kOpen) != 0);
}

TEST_CASE("an answer opens the gate that its question has closed, and no other", "[watchdog]") {
  ForwardMailbox mailbox{};
  ask(mailbox, 7);
  open_gate(mailbox, 6);
  REQUIRE(gate(mailbox) == ForwardGate::closed(7));
  open_gate(mailbox, 7);
  REQUIRE(gate(mailbox) == ForwardGate::answered(7));
}

TEST_CASE("an answer that does not come in time opens the gate, once it is asked for and not before", "[watchdog]") {
  ForwardMailbox mailbox{};
  AnswerWatchdog watchdog(mailbox, 100ms);
  // Nothing is planned.
  ask(mailbox, 1);
  std::this_thread::sleep_for(300ms);
  REQUIRE(gate(mailbox) == ForwardGate::closed(1));
  for (std::uint64_t forward = 1; forward < 4; ++forward) {
    const auto begin = Clock::now();
    ask(mailbox, 2 * forward);
    watchdog.wake(forward);
    REQUIRE(comes([&] { return gate(mailbox) == ForwardGate::given_up(2 * forward); }));
    REQUIRE(Clock::now() - begin >= 100ms);
    open_gate(mailbox, 2 * forward);  // Too late.
    REQUIRE(gate(mailbox) == ForwardGate::given_up(2 * forward));
    // One that is answered stays as it is.
    std::atomic_ref(mailbox.answer.answered).store(2 * forward + 1);
    ask(mailbox, 2 * forward + 1);
    std::this_thread::sleep_for(250ms);
    REQUIRE(gate(mailbox) == ForwardGate::closed(2 * forward + 1));
    std::atomic_ref(mailbox.outcome.forward).store(forward);
  }
}

TEST_CASE("a watchdog that gets no thread is out of capacity", "[watchdog]") {
  ForwardMailbox mailbox{};
  const test::NoThreads none;
  REQUIRE(test::code_of([&] { return AnswerWatchdog(mailbox, 100ms), 0; }) == Errc::out_of_capacity);
}
