// Who has memory, and who gives it up.
#include <algorithm>
#include <map>
#include <optional>

#include "tests/scheduler/admission_support.hpp"
#include "tests/scheduler/naive_admission.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::admission;

TEST_CASE("the youngest makes room, keeps its place and its tokens", "[admission]") {
  // 1 and 2 have two pages, and a third one each after 16 tokens.
  Admission admission({.decode_rows = 4, .prefill_rows = 64, .prefills = 4, .page_tokens = 8, .pages = 5});
  submit(admission, 1, 16, 12);
  submit(admission, 2, 14, 8);
  submit(admission, 3, 9, 1);
  CHECK(run(admission).admit == Ids{1, 2});
  CHECK(run(admission).admit.empty());
  CHECK(run(admission).preempt.empty());
  Turn turn = run(admission);
  CHECK(turn.preempt == Ids{2});
  CHECK(turn.admit.empty());
  CHECK(turn.rows == std::vector<Rows>{{1, 18, 1, false, true}});
  CHECK(admission.use().pages == 3);
  for (int left = 7; left != 0; --left) CHECK(run(admission).admit.empty());  // 3 does not overtake 2.
  CHECK(run(admission).ended == Ids{1});
  // 2 was given three tokens; it is given the other five.
  turn = run(admission);
  CHECK(turn.admit == Ids{2, 3});
  CHECK(turn.rows == std::vector<Rows>{{2, 0, 17, true, true}, {3, 0, 9, true, true}});
  for (std::uint32_t at = 17; at < 20; ++at) CHECK(run(admission).rows == std::vector<Rows>{{2, at, 1, false, true}});
  CHECK(run(admission).ended == Ids{2});
}

TEST_CASE("exactly a page, and one token more", "[admission]") {
  Admission admission({.prefill_rows = 64, .page_tokens = 8, .pages = 2});
  submit(admission, 1, 16, 1);  // Its new token's key is not needed: 2 pages.
  check_fails([&] { submit(admission, 2, 16, 2); }, Errc::out_of_capacity, "17 tokens");
  check_fails([&] { submit(admission, 2, 17, 0); }, Errc::out_of_capacity, "a sequence may have 16");
  submit(admission, 2, 15, 2);
  Turn turn = run(admission);
  CHECK(turn.admit == Ids{1});
  CHECK(turn.ended == Ids{1});
  turn = run(admission);
  CHECK(turn.admit == Ids{2});
  CHECK(run(admission).ended == Ids{2});
}

TEST_CASE("a watermark is left to those that run, and does not stop one alone", "[admission]") {
  const auto admitted = [](std::uint64_t watermark) {
    Admission admission({.decode_rows = 4, .page_tokens = 8, .pages = 6, .watermark_pages = watermark});
    submit(admission, 1, 16, 8);
    submit(admission, 2, 16, 8);
    return run(admission).admit;
  };
  CHECK(admitted(1) == Ids{1, 2});
  CHECK(admitted(2) == Ids{1});
  CHECK(admitted(100) == Ids{1});
}

TEST_CASE("rows that decode, sequences, and policies that choose on the CPU bound who runs", "[admission]") {
  AdmissionOptions options = kOptions;
  options.cpu_sequences = 1;
  const auto admitted = [&](std::initializer_list<bool> on_cpu) {
    Admission admission(options);
    std::uint64_t id = 0;
    for (const bool cpu : on_cpu) submit(admission, ++id, 4, 4, cpu);
    return run(admission).admit;
  };
  CHECK(admitted({false, true, false, false, false}) == Ids{1, 2, 3, 4});
  CHECK(admitted({true, false, true, false}) == Ids{1, 2});  // First come, first served: 4 waits behind 3.
  options.sequences = 3;
  CHECK(admitted({false, false, false, false}) == Ids{1, 2, 3});
  options.decode_rows = 2;
  CHECK(admitted({false, false, false, false}) == Ids{1, 2});
  options.cpu_sequences = 0;
  Admission admission(options);
  check_fails([&] { submit(admission, 1, 4, 4, true); }, Errc::out_of_capacity, "cpu_sequences is 0");
}

TEST_CASE("near memory bounds who runs by what one iteration needs, or by all that they have", "[admission]") {
  AdmissionOptions options = kOptions;
  options.near_pages = 6;
  options.near_pages_per_sequence = 2;
  Admission progressive(options);
  for (std::uint64_t id = 1; id <= 4; ++id) submit(progressive, id, 24, 8);
  CHECK(run(progressive).admit == Ids{1, 2, 3});
  CHECK(progressive.use().near_pages == 6);

  options.near_pages_per_sequence = 0;
  Admission whole(options);
  for (std::uint64_t id = 1; id <= 4; ++id) submit(whole, id, 24, 8);
  CHECK(run(whole).admit == Ids{1});  // 4 pages in the end, and 4 for the next.
  check_fails([&] { submit(whole, 5, 48, 2); }, Errc::out_of_capacity, "7 near pages");
}

TEST_CASE("pages that sequences share count once if the engine says how many there are", "[admission]") {
  const auto admitted = [](std::optional<std::uint64_t> held) {
    Admission admission({.decode_rows = 4, .prefill_rows = 512, .prefills = 4, .page_tokens = 8, .pages = 20});
    submit(admission, 1, 64, 60);
    submit(admission, 2, 65, 60);
    CHECK(run(admission).admit == Ids{1, 2});  // 8 and 9 pages
    submit(admission, 3, 65, 1);
    (void)admission.admit();
    submit(admission, 4, 65, 1);
    const AdmissionChanges changes = admission.admit(held);
    return numbers(changes.admit);
  };
  CHECK(admitted({}).empty());
  CHECK(admitted(17).empty());
  CHECK(admitted(11).empty());
  CHECK(admitted(10) == Ids{3});
  CHECK(admitted(100).empty());  // Others' pages are not ours to know.
}

TEST_CASE("who is preempted leaves the pages that others share", "[admission]") {
  constexpr std::uint32_t kSequences = 20, kShared = 10;
  std::size_t most = 0;
  for (std::uint64_t pages = 60; pages < 100; ++pages) {
    CAPTURE(pages);
    Admission admission({.decode_rows = kSequences,
                         .prefill_rows = 512,
                         .prefills = kSequences,
                         .sequences = kSequences,
                         .page_tokens = 1,
                         .pages = pages});
    std::map<RequestId, std::uint32_t> own;  // Pages beside those that all begin with.
    const auto held = [&] {
      std::uint64_t sum = kShared;
      for (const auto& [id, count] : own) sum += count;
      return sum;
    };
    for (std::uint64_t id = 0; id < kSequences; ++id) submit(admission, id, kShared + 1, 40);
    while (admission.use().waiting + admission.use().running != 0) {
      const AdmissionChanges changes = admission.admit(held());
      most = std::max(most, changes.preempt.size());
      for (const RequestId id : changes.preempt) own.erase(id);
      for (const RequestId id : changes.admit) admission.begun(id, kShared);
      for (const TurnItem& item : admission.next()) own[item.request] += item.tokens;
      law(held() <= pages, "more pages are held than there are");
      for (const RequestId id : admission.complete()) own.erase(id);
    }
  }
  CHECK(most > 1);
}

TEST_CASE("one that the engine has no room for waits with all younger ones until another has ended", "[admission]") {
  Admission admission(kOptions);
  for (std::uint64_t id = 1; id <= 4; ++id) submit(admission, id, 8, 3);
  CHECK(numbers(admission.admit().admit) == Ids{1, 2, 3, 4});
  admission.begun(RequestId{2}, 7);
  CHECK(numbers(admission.preempt(RequestId{3})) == Ids{4, 3});
  CHECK(admission.preempt(RequestId{4}).empty());
  CHECK(admission.admit().admit.empty());
  const std::vector<TurnItem> items = admission.next();
  REQUIRE(items.size() == 2);
  CHECK((items[1].first == 7 && items[1].tokens == 1 && items[1].output));
  CHECK(admission.complete().empty());
  CHECK(run(admission).admit.empty());
  admission.end(RequestId{4});
  CHECK(run(admission).ended == Ids{1, 2});
  CHECK(run(admission).admit == Ids{3});
  CHECK(numbers(admission.preempt(RequestId{3})) == Ids{3});
  CHECK(run(admission).admit == Ids{3});  // Nobody else is there whose end could help.
}
