#include "sluice/admission.hpp"

#include <map>

#include "sluice/engine.hpp"
#include "tests/scheduler/admission_history.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

using Ids = std::vector<std::uint64_t>;

Ids numbers(const std::vector<RequestId>& ids) {
  Ids values;
  for (const RequestId id : ids) values.push_back(id.value);
  return values;
}

/// Rows of a turn, so that tests can compare them.
struct Rows {
  std::uint64_t request;
  std::uint32_t first, tokens;
  bool prefill, output;
  friend bool operator==(const Rows&, const Rows&) = default;
};
std::ostream& operator<<(std::ostream& out, const Rows& rows) {
  return out << rows.request << ": " << rows.tokens << " from " << rows.first << (rows.prefill ? " prefill" : "")
             << (rows.output ? " output" : "");
}

struct Turn {
  Ids preempt, admit;
  std::vector<Rows> rows;
  Ids ended;
};

Turn run(Admission& admission, std::uint32_t chunk = 0) {
  Turn turn;
  const AdmissionChanges changes = admission.admit();
  turn.preempt = numbers(changes.preempt);
  turn.admit = numbers(changes.admit);
  for (const TurnItem& item : admission.next(chunk))
    turn.rows.push_back({item.request.value, item.first, item.tokens, item.prefill, item.output});
  if (!turn.rows.empty()) turn.ended = numbers(admission.complete());
  return turn;
}

void submit(Admission& admission, std::uint64_t id, std::uint32_t prompt, std::uint32_t most, bool on_cpu = false) {
  admission.submit({.id = RequestId{id}, .prompt_tokens = prompt, .max_new_tokens = most, .on_cpu = on_cpu});
}

template <class Call>
void check_fails(const Call& call, Errc code, const std::string& words) {
  try {
    call();
    FAIL("no error");
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.code() == code);
    CHECK(std::string(error.what()).find(words) != std::string::npos);
  }
}

constexpr AdmissionOptions kOptions{
    .decode_rows = 4, .prefill_rows = 64, .prefills = 4, .sequences = 4, .page_tokens = 8, .pages = 16};

}  // namespace

TEST_CASE("whatever comes, limits hold, the oldest gets on, and every request ends", "[admission]") {
  std::uint64_t preempted = 0;
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    CAPTURE(seed);
    AdmissionHistory history(seed);
    const std::vector<std::uint64_t> log = history.run();
    preempted += history.preempted();
    if (seed % 16 == 0) law(AdmissionHistory(seed).run() == log, "the same calls have other answers");
  }
  CHECK(preempted > 5'000);
}

TEST_CASE("nothing to do is an empty turn, as often as asked", "[admission]") {
  Admission admission(kOptions);
  for (int i = 0; i < 3; ++i) {
    const Turn turn = run(admission);
    CHECK((turn.preempt.empty() && turn.admit.empty() && turn.rows.empty()));
  }
  CHECK(admission.options().max_tokens == 128);
}

TEST_CASE("a request without new tokens ends with its prompt, one with a single one likewise", "[admission]") {
  Admission admission(kOptions);
  submit(admission, 1, 1, 0);
  submit(admission, 2, 8, 1);
  submit(admission, 3, 9, 2);
  Turn turn = run(admission);
  CHECK(turn.admit == Ids{1, 2, 3});
  CHECK(turn.rows == std::vector<Rows>{{1, 0, 1, true, false}, {2, 0, 8, true, true}, {3, 0, 9, true, true}});
  CHECK(turn.ended == Ids{1, 2});
  turn = run(admission);
  CHECK(turn.rows == std::vector<Rows>{{3, 9, 1, false, true}});
  CHECK(turn.ended == Ids{3});
  CHECK(admission.running().empty());
}

TEST_CASE("rows for prompts are shared in order, and chunks end where pages do", "[admission]") {
  Admission admission({.decode_rows = 4, .prefill_rows = 20, .prefills = 3, .page_tokens = 8, .pages = 32});
  submit(admission, 1, 3, 9);
  submit(admission, 2, 30, 1);
  submit(admission, 3, 8, 1);
  submit(admission, 4, 2, 1);
  CHECK(run(admission).rows == std::vector<Rows>{{1, 0, 3, true, true}, {2, 0, 16, true, false}});
  // Decoding goes on beside them. The third does not get into what 2 leaves, and 4 does not overtake it.
  CHECK(run(admission).rows == std::vector<Rows>{{1, 3, 1, false, true}, {2, 16, 14, true, true}});
  CHECK(run(admission, 9).rows == std::vector<Rows>{{1, 4, 1, false, true}, {3, 0, 8, true, true}});
  CHECK(run(admission).rows == std::vector<Rows>{{1, 5, 1, false, true}, {4, 0, 2, true, true}});
}

TEST_CASE("rows that do not reach a page's end are used by the oldest prompt alone", "[admission]") {
  Admission admission({.decode_rows = 4, .prefill_rows = 20, .prefills = 3, .page_tokens = 8, .pages = 32});
  submit(admission, 1, 17, 1);
  submit(admission, 2, 17, 1);
  CHECK(run(admission, 5).rows == std::vector<Rows>{{1, 0, 5, true, false}});
  CHECK(run(admission, 5).rows == std::vector<Rows>{{1, 5, 3, true, false}});
  CHECK(run(admission, 16).rows == std::vector<Rows>{{1, 8, 9, true, true}});
  CHECK(run(admission, 1).rows == std::vector<Rows>{{2, 0, 1, true, false}});
}

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

TEST_CASE("what failed comes again, and what ends meanwhile does not", "[admission]") {
  Admission admission(kOptions);
  submit(admission, 1, 12, 2);
  submit(admission, 2, 8, 2);
  (void)admission.admit();
  CHECK(admission.next().size() == 2);
  CHECK(admission.use().pages == 3);
  admission.fail();
  CHECK(run(admission).rows == std::vector<Rows>{{1, 0, 12, true, true}, {2, 0, 8, true, true}});
  (void)admission.admit();
  CHECK(admission.next().size() == 2);
  admission.end(RequestId{1});
  submit(admission, 1, 5, 1);  // The number is free, and the turn is not the new one's.
  CHECK(numbers(admission.complete()) == Ids{2});
  CHECK(run(admission).rows == std::vector<Rows>{{1, 0, 5, true, true}});
}

TEST_CASE("calls out of order are refused and change nothing", "[admission]") {
  Admission admission(kOptions);
  check_fails([&] { (void)admission.next(); }, Errc::invalid_argument, "call `admit` first");
  check_fails([&] { (void)admission.complete(); }, Errc::invalid_argument, "no turn is open");
  check_fails([&] { admission.fail(); }, Errc::invalid_argument, "no turn is open");
  for (const auto& call : {+[](Admission& a) { a.end(RequestId{7}); }, +[](Admission& a) { a.begun(RequestId{7}, 0); },
                           +[](Admission& a) { (void)a.preempt(RequestId{7}); }})
    check_fails([&] { call(admission); }, Errc::not_found, "no request 7");
  submit(admission, 7, 9, 2);
  check_fails([&] { submit(admission, 7, 1, 1); }, Errc::invalid_argument, "lives already");
  check_fails([&] { submit(admission, 8, 0, 1); }, Errc::invalid_argument, "no prompt tokens");
  check_fails([&] { submit(admission, 8, ~0u, ~0u); }, Errc::out_of_capacity, "8589934589 tokens");
  check_fails([&] { admission.begun(RequestId{7}, 0); }, Errc::invalid_argument, "waits");
  (void)admission.admit();
  check_fails([&] { admission.begun(RequestId{7}, 9); }, Errc::invalid_argument, "the last one is to be computed");
  admission.begun(RequestId{7}, 8);
  CHECK(admission.next().size() == 1);
  for (const auto& call : {+[](Admission& a) { (void)a.admit(); }, +[](Admission& a) { (void)a.next(); },
                           +[](Admission& a) { (void)a.preempt(RequestId{7}); }})
    check_fails([&] { call(admission); }, Errc::invalid_argument, "turn of 1 items is open");
  CHECK(admission.complete().empty());
  check_fails([&] { (void)admission.next(); }, Errc::invalid_argument, "call `admit` first");
  check_fails([&] { admission.begun(RequestId{7}, 0); }, Errc::invalid_argument, "has computed some");
  CHECK(run(admission).rows == std::vector<Rows>{{7, 9, 1, false, true}});
}

TEST_CASE("options out of range are named", "[admission]") {
  const auto refused = [](const std::string& field, const auto& change) {
    AdmissionOptions options = kOptions;
    change(options);
    check_fails([&] { const Admission admission(options); }, Errc::invalid_argument, "AdmissionOptions::" + field);
  };
  refused("decode_rows", [](AdmissionOptions& o) { o.decode_rows = 0; });
  refused("prefill_rows", [](AdmissionOptions& o) { o.prefill_rows = 0; });
  refused("prefills", [](AdmissionOptions& o) { o.prefills = 0; });
  refused("sequences", [](AdmissionOptions& o) { o.sequences = 0; });
  refused("page_tokens", [](AdmissionOptions& o) { o.page_tokens = 0; });
  refused("pages", [](AdmissionOptions& o) { o.pages = 0; });
  refused("pages", [](AdmissionOptions& o) { o.pages = (std::uint64_t{1} << 32) + 1; });
}

TEST_CASE("an engine's options are those of its admission", "[admission]") {
  EngineOptions engine{.shape = {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64},
                       .page_tokens = 8,
                       .kv_dtype = DType::f16,
                       .host_bytes = 5 * 3 * 2 * 2 * 8 * 64 * 2 + 1,
                       .largest = {.decode_rows = 7, .prefill_rows = 30, .prefills = 2, .max_tokens = 24},
                       .sequences = 9,
                       .cpu_sequences = 1};
  const AdmissionOptions options = admission_options(engine);
  CHECK(options.pages == 5);
  CHECK((options.decode_rows == 7 && options.prefill_rows == 30 && options.prefills == 2 && options.sequences == 9));
  CHECK((options.cpu_sequences == 1 && options.page_tokens == 8 && options.max_tokens == 24));
  engine.host_bytes = 6143;
  check_fails([&] { (void)admission_options(engine); }, Errc::invalid_argument, "takes 12288");
}
