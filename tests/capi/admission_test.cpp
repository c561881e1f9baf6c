// The controller by the C interface decides what the C++ one does.
#include "sluice/admission.hpp"

#include <cstddef>
#include <cstring>

#include "sluice/engine.hpp"
#include "tests/capi/small_admission.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::capi;

namespace {

/// The same by C++.
AdmissionOptions options_of_cpp(bool windows) {
  AdmissionOptions options{.decode_rows = kMost,
                           .prefill_rows = 20,
                           .prefills = 2,
                           .cpu_sequences = 1,
                           .page_tokens = 4,
                           .pages = 9,
                           .watermark_pages = 1,
                           .near_pages = 5,
                           .near_pages_per_sequence = 2,
                           .slowdown = 2.0};
  if (!windows) return options;
  options.pages = 31;
  options.page_blocks = 2;
  options.window_blocks = 3;
  options.window_pages = 4;
  options.window_resting_pages = 1;
  return options;
}

Ids numbers(const std::vector<RequestId>& ids) {
  Ids values;
  for (const RequestId id : ids) values.push_back(id.value);
  return values;
}

/// Both are asked for the same, and answer the same.
class Both {
 public:
  Both(std::uint64_t seed, bool windows)
      : random_(seed), c_(create(options_of_c(windows))), cpp_(options_of_cpp(windows)) {}

  void run() {
    for (int step = 0; step < 60; ++step) {
      if (random_.below(2) == 0) submit();
      turn();
    }
  }

 private:
  void submit() {
    const sluice_request asked = request(next_++, 1 + random_.below(20), random_.below(10), random_.below(2));
    const AdmissionRequest same{.id = RequestId{asked.id},
                                .prompt_tokens = asked.prompt_tokens,
                                .max_new_tokens = asked.max_new_tokens,
                                .on_cpu = asked.on_cpu != 0};
    require_ok(sluice_admission_submit(c_.get(), &asked));
    cpp_.submit(same);
  }

  void turn() {
    const std::uint64_t held = random_.below(static_cast<std::uint32_t>(cpp_.options().pages));
    const bool tells = random_.below(2) == 0;
    List preempted, admitted;
    require_ok(sluice_admission_admit(c_.get(), tells ? &held : nullptr, preempted.ids, &preempted.count, admitted.ids,
                                      &admitted.count));
    const AdmissionChanges changes = cpp_.admit(tells ? std::optional(held) : std::nullopt);
    REQUIRE(preempted.get() == numbers(changes.preempt));
    REQUIRE(admitted.get() == numbers(changes.admit));
    if (!changes.admit.empty() && random_.below(3) == 0) stop(changes.admit.back());
    List running;
    require_ok(sluice_admission_running(c_.get(), running.ids, &running.count));
    REQUIRE(running.get() == numbers(cpp_.running()));
    rows();
    use();
  }

  void stop(RequestId id) {
    require_ok(sluice_admission_begun(c_.get(), id.value, 0));
    cpp_.begun(id, 0);
    if (random_.below(2) == 0) return;
    List stopped;
    require_ok(sluice_admission_preempt(c_.get(), id.value, stopped.ids, &stopped.count));
    REQUIRE(stopped.get() == numbers(cpp_.preempt(id)));
  }

  void rows() {
    std::vector<sluice_turn_item> items(kMost, sized<sluice_turn_item>());
    std::size_t count = items.size();
    const std::uint32_t chunk = random_.below(20);
    require_ok(sluice_admission_next(c_.get(), chunk, items.data(), &count));
    const std::vector<TurnItem> want = cpp_.next(chunk);
    REQUIRE(count == want.size());
    for (std::size_t i = 0; i < count; ++i) {
      CHECK((items[i].request == want[i].request.value && items[i].tokens == want[i].tokens));
      CHECK((items[i].first == want[i].first && items[i].prefill == (want[i].prefill ? 1u : 0u)));
      CHECK((items[i].output == (want[i].output ? 1u : 0u) && items[i].reserved == 0));
    }
    if (count == 0) return;
    if (random_.below(4) == 0) {
      require_ok(sluice_admission_fail(c_.get()));
      return cpp_.fail();
    }
    List ended;
    const double seconds = 1e-3 * random_.below(100);
    require_ok(sluice_admission_complete(c_.get(), seconds, ended.ids, &ended.count));
    REQUIRE(ended.get() == numbers(cpp_.complete(seconds)));
    const std::vector<RequestId> running = cpp_.running();
    if (running.empty() || random_.below(8) != 0) return;
    require_ok(sluice_admission_end(c_.get(), running.front().value));
    cpp_.end(running.front());
  }

  void use() {
    auto use = sized<sluice_admission_use>();
    require_ok(sluice_admission_get_use(c_.get(), &use));
    const AdmissionUse want = cpp_.use();
    CHECK((use.waiting == want.waiting && use.running == want.running && use.reserved == 0));
    CHECK((use.pages == want.pages && use.near_pages == want.near_pages));
  }

  Random random_;
  AdmissionPointer c_;
  Admission cpp_;
  std::uint64_t next_ = 1;
};

}  // namespace

TEST_CASE("an admission of C decides what one of C++ does", "[capi][admission]") {
  const bool windows = GENERATE(false, true);
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    CAPTURE(windows, seed);
    Both(seed, windows).run();
  }
}

TEST_CASE("an admission's options: the defaults, those of an engine, and what it was made with", "[capi][admission]") {
  auto options = sized<sluice_admission_options>();
  require_ok(sluice_admission_options_init(&options, sizeof options));
  const AdmissionOptions defaults;
  CHECK((options.decode_rows == defaults.decode_rows && options.prefill_rows == defaults.prefill_rows));
  CHECK((options.prefills == defaults.prefills && options.sequences == defaults.sequences && options.pages == 0));
  CHECK((options.page_tokens == defaults.page_tokens && options.max_tokens == 0 && options.near_pages == 0));

  auto of = small_options();
  of.largest_prefill_rows = 32;
  of.largest_prefills = 1;
  constexpr const char* const kOnCpu[] = {"lfps"};
  of.policies = kOnCpu;
  of.cpu_sequences = 1;
  const EnginePointer engine = create(of);
  require_ok(sluice_admission_options_of(engine.get(), &options));
  // Of 16 tokens, keys and values of 2 bytes.
  CHECK(options.pages == (1u << 20) / (2 * 16 * kHeadDim * 2 * kLayers * kKvHeads));
  CHECK((options.decode_rows == kRows && options.prefill_rows == 32 && options.prefills == 1));
  CHECK((options.sequences == 2 && options.cpu_sequences == 1 && options.page_tokens == 16));
  CHECK(options.max_tokens == 16 * options.pages);

  auto made = options_of_c(true);
  made.sequences = 7;
  made.max_tokens = 13;
  const AdmissionPointer admission = create(made);
  require_ok(sluice_admission_get_options(admission.get(), &options));
  made.struct_size = options.struct_size;
  CHECK(std::memcmp(&made, &options, sizeof made) == 0);
}
