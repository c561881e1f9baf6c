// Whose turn it is: rows, order, what ends and what fails.
#include <algorithm>
#include <cmath>

#include "sluice/engine.hpp"
#include "tests/scheduler/admission_history.hpp"
#include "tests/scheduler/admission_support.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::admission;

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
  refused("page_blocks is 0", [](AdmissionOptions& o) { o.page_blocks = 0; });
}

TEST_CASE("an engine's options are those of its admission", "[admission]") {
  EngineOptions engine{.shape = {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64},
                       .page_tokens = 8,
                       .kv_dtype = DType::f16,
                       .host_bytes = 5 * 3 * 2 * 2 * 8 * 64 * 2 + 1,
                       .policies = {parse_policy("lfps")},
                       .largest = {.decode_rows = 7, .prefill_rows = 30, .prefills = 2, .max_tokens = 24},
                       .sequences = 9,
                       .cpu_sequences = 1};
  const AdmissionOptions options = admission_options(engine);
  CHECK(options.pages == 5);
  CHECK((options.decode_rows == 7 && options.prefill_rows == 30 && options.prefills == 2 && options.sequences == 9));
  CHECK((options.cpu_sequences == 1 && options.page_tokens == 8 && options.max_tokens == 24));
  engine.policies = {parse_policy("sluice")};
  CHECK(admission_options(engine).cpu_sequences == 0);
  engine.host_bytes = 6143;
  check_fails([&] { (void)admission_options(engine); }, Errc::invalid_argument, "takes 12288");
}

TEST_CASE("beside rows that decode, a prompt's chunks keep to the slowdown that was asked for", "[admission]") {
  // What a forward of some machine takes, in seconds.
  const auto seconds = [](std::uint32_t rows, std::uint32_t chunk, std::uint32_t first) {
    return 0.004 + 0.0002 * rows + 0.00005 * chunk + 2e-9 * chunk * (first + 0.5 * chunk);
  };
  for (const double slowdown : {0.0, 1.5, 3.0}) {
    CAPTURE(slowdown);
    Admission admission({.decode_rows = 4,
                         .prefill_rows = 2048,
                         .prefills = 2,
                         .page_tokens = 16,
                         .pages = 8192,
                         .slowdown = slowdown});
    for (std::uint64_t id = 1; id <= 3; ++id) submit(admission, id, 16, 20'000);
    double worst = 0.0;
    std::uint32_t prompt_turns = 0;
    for (int turn = 0; turn < 2000; ++turn) {
      if (turn == 50) submit(admission, 4, 40'000, 1);
      (void)admission.admit();
      std::uint32_t rows = 0, chunk = 0, first = 0;
      for (const TurnItem& item : admission.next()) {
        (item.prefill ? chunk : rows) += item.tokens;
        first = item.prefill ? item.first : first;
      }
      if (turn < 50) REQUIRE(chunk <= 48);
      if (chunk != 0 && turn >= 60) worst = std::max(worst, seconds(rows, chunk, first) / seconds(rows, 0, 0));
      prompt_turns += turn >= 50 && chunk != 0 ? 1 : 0;
      (void)admission.complete(seconds(rows, chunk, first));
      if (turn > 50 && chunk == 0) break;
    }
    if (slowdown == 0.0) {
      CHECK(prompt_turns == 20);
    } else {
      CHECK(worst <= slowdown + 0.05);
      CHECK(worst >= 0.8 * slowdown);
    }
  }
  for (const double wrong : {0.5, -1.0, 1001.0, std::nan("")}) {
    AdmissionOptions options = kOptions;
    options.slowdown = wrong;
    check_fails([&] { Admission admission(options); }, Errc::invalid_argument, "slowdown");
  }
}

TEST_CASE("a slowdown holds for all chunks of a forward together", "[admission]") {
  const auto seconds = [](std::uint32_t rows, double tokens, double pairs) {
    return 0.004 + 0.0002 * rows + 0.00005 * tokens + 2e-8 * pairs;
  };
  Admission admission(
      {.decode_rows = 4, .prefill_rows = 2048, .prefills = 4, .page_tokens = 16, .pages = 16'384, .slowdown = 1.5});
  submit(admission, 1, 16, 60'000);
  double worst = 0.0;
  for (int turn = 0; turn < 1500; ++turn) {
    if (turn == 20) submit(admission, 2, 60'000, 1);
    if (turn == 1000) {
      submit(admission, 3, 205, 1);
      submit(admission, 4, 62'000, 1);
    }
    const AdmissionChanges changes = admission.admit();
    if (turn == 1000) admission.begun(RequestId{4}, 60'000);
    std::uint32_t rows = 0;
    double tokens = 0.0, pairs = 0.0;
    for (const TurnItem& item : admission.next()) {
      rows += item.prefill ? 0 : 1;
      tokens += item.prefill ? item.tokens : 0;
      pairs += item.prefill ? item.tokens * (item.first + 0.5 * (item.tokens + 1)) : 0.0;
    }
    // One page is computed whatever it takes.
    if (turn > 40 && tokens > 16) worst = std::max(worst, seconds(rows, tokens, pairs) / seconds(rows, 0, 0));
    (void)admission.complete(seconds(rows, tokens, pairs));
  }
  CHECK(admission.use().waiting == 0);
  CHECK(worst <= 1.6);
}

TEST_CASE("a request that waits can be preempted without holding others back", "[admission]") {
  Admission admission(kOptions);
  submit(admission, 1, 8, 20);
  submit(admission, 2, 8 * 16, 1);  // Has no room beside that.
  CHECK(run(admission).admit == Ids{1});
  CHECK(admission.preempt(RequestId{2}).empty());
  admission.end(RequestId{2});
  submit(admission, 3, 8, 1);
  CHECK(run(admission).admit == Ids{3});
}
