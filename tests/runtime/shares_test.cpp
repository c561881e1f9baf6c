// Items of one question after the other, shared out among threads that come early, late and too late.
#include "runtime/far/shares.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"

using sluice::kNone;
using sluice::runtime::ListShares;
using sluice::runtime::Shares;

TEST_CASE("items are claimed once, and who is late gets none", "[engine]") {
  Shares shares;
  const auto three = [] { return 3u; };
  const auto none = [] { return 0u; };
  REQUIRE(shares.total(1, three) == 3);
  REQUIRE(shares.total(1, none) == 3);  // The first has said.
  for (std::uint32_t item = 0; item < 3; ++item) REQUIRE(shares.claim(1, 3) == item);
  REQUIRE(shares.claim(1, 3) == kNone);
  REQUIRE_FALSE(shares.finish(3));
  REQUIRE_FALSE(shares.finish(3));
  REQUIRE(shares.finish(3));
  REQUIRE(shares.total(2, none) == 0);  // Not over: there is nothing to do.
  REQUIRE(shares.total(3, three) == 3);
  REQUIRE(shares.total(2, three) == kNone);  // Over.
  REQUIRE(shares.claim(2, 3) == kNone);
  REQUIRE(shares.claim(3, 3) == 0);
}

TEST_CASE("questions without items do not use up the numbers of those that have some", "[engine]") {
  // Words of a question are known modulo 2^32, and compared by how far they are apart: what is never claimed must go on
  // all the same. Steps as large as a comparison bears.
  Shares shares;
  const auto none = [] { return 0u; };
  std::uint64_t asked = 1;
  for (int i = 0; i < 9; ++i, asked += 0x7000'0000u) REQUIRE(shares.total(asked, none) == 0);
  REQUIRE(shares.total(asked, [] { return 1u; }) == 1);
  REQUIRE(shares.claim(asked, 1) == 0);
}

TEST_CASE("threads that take part in thousands of questions do every item once", "[engine]") {
  constexpr std::uint64_t kQuestions = 20'000;
  Shares shares;
  std::atomic<std::uint64_t> asked{1}, answered{0};
  std::atomic<std::uint64_t> done{0}, twice{0};
  const auto items_of = [](std::uint64_t question) { return static_cast<std::uint32_t>(question % 5); };
  const auto work = [&] {
    std::uint64_t seen = 0;
    while (answered.load() < kQuestions) {
      const std::uint64_t question = asked.load();
      if (question == seen) {
        std::this_thread::yield();
        continue;
      }
      seen = question;
      // What stands when it is counted, not what stood before.
      const std::uint32_t items = shares.total(question, [&] { return items_of(asked.load()); });
      if (items == kNone) continue;
      const auto say = [&] {
        if (answered.exchange(question) != question - 1) ++twice;
        asked.store(question + 1);
      };
      if (items == 0) {
        std::uint64_t before = question - 1;  // Nobody has the last item: the first to find out says so.
        if (answered.compare_exchange_strong(before, question)) asked.store(question + 1);
      }
      for (std::uint32_t item = 0; (item = shares.claim(question, items)) != kNone;) {
        ++done;
        if (shares.finish(items)) say();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  std::uint64_t want = 0;
  for (std::uint64_t question = 1; question <= kQuestions; ++question) want += items_of(question);
  REQUIRE(done >= want);
  REQUIRE(done <= want + 5);  // A question or two more may have been begun.
  REQUIRE(twice == 0);
}

TEST_CASE("parts of a list are claimed once, from when it is open, and who is late gets none", "[engine]") {
  ListShares shares(3);
  REQUIRE(shares.claim(1, 0).parts == 0);
  shares.open(1, 2, 2);
  REQUIRE(shares.opened() == 1);
  REQUIRE(shares.claim(1, 0).parts == 0);  // The others may still be chosen for.
  for (std::uint32_t part = 0; part < 2; ++part) {
    const auto [claimed, parts] = shares.claim(1, 2);
    REQUIRE(claimed == part);
    REQUIRE(parts == 2);
    REQUIRE_FALSE(shares.finish());  // Lists may follow.
  }
  REQUIRE(shares.claim(1, 2).parts == 0);
  shares.open(1, 0, 1);
  REQUIRE_FALSE(shares.close());
  REQUIRE(shares.claim(1, 0).parts == 1);
  REQUIRE(shares.finish());
  REQUIRE(shares.close());  // A question without far rows.
  shares.open(3, 2, 1);
  REQUIRE(shares.claim(1, 2).parts == 0);
  REQUIRE(shares.claim((std::uint64_t{1} << 32) + 3, 2).parts == 1);  // Known modulo 2^32.
  REQUIRE_FALSE(shares.finish());
  REQUIRE(shares.close());
}

TEST_CASE("threads that open lists and take their parts do each once, and one of them is the last", "[engine]") {
  constexpr std::uint64_t kQuestions = 5'000;
  constexpr std::uint32_t kLists = 5;
  Shares items;
  ListShares lists(kLists);
  std::atomic<std::uint64_t> asked{1}, answered{0}, open{0}, done{0}, twice{0};
  // Parts of a list: some have none.
  const auto parts_of = [](std::uint64_t question, std::uint32_t list) {
    return static_cast<std::uint32_t>((question + 3 * list) % 4);
  };
  const auto work = [&] {
    std::uint64_t seen = 0;
    while (answered.load() < kQuestions) {
      const std::uint64_t question = asked.load();
      if (question == seen) {
        std::this_thread::yield();
        continue;
      }
      seen = question;
      const auto say = [&] {
        if (answered.exchange(question) != question - 1) ++twice;
        asked.store(question + 1);
      };
      const std::uint32_t all = items.total(question, [] { return kLists; });
      if (all == kNone) continue;
      for (std::uint32_t item = 0; (item = items.claim(question, all)) != kNone;) {
        if (const std::uint32_t parts = parts_of(question, item); parts != 0) lists.open(question, item, parts);
        if (!items.finish(all)) continue;
        open.store(question);
        if (lists.close()) say();
      }
      for (bool last = false; !last;) {
        last = open.load() >= question;
        for (std::uint32_t list = 0; list < kLists; ++list) {
          while (lists.claim(question, list).parts != 0) {
            ++done;
            if (lists.finish()) say();
          }
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  std::uint64_t want = 0;
  for (std::uint64_t question = 1; question <= kQuestions; ++question)
    for (std::uint32_t list = 0; list < kLists; ++list) want += parts_of(question, list);
  REQUIRE(done >= want);
  REQUIRE(done <= want + 2 * 3 * kLists);  // A question or two more may have been begun.
  REQUIRE(twice == 0);
}
