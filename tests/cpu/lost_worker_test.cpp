// A worker that does not return in time, and goes on when its caller has long gone. What it uses of the call must still
// be there; the address sanitizer would tell.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/forward/forward_verbs.hpp"
#include "cpu/machine/host_pool.hpp"
#include "cpu/threads/rates.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/derived_pages.hpp"
#include "tests/support/stall.hpp"
#include "tools/stages/host_stages.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kPages = 64;
constexpr std::uint32_t kPageTokens = 64;
constexpr std::uint32_t kTokens = kPages * kPageTokens;
constexpr AttentionShape kShape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr PageLayout kLayout{.page_tokens = kPageTokens, .head_dim = 64, .dtype = DType::f32};
constexpr std::uint32_t kGroup = 4;

/// The callers' own memory: it stays. One KV head's pages, and room for whatever stages write.
struct Tensors {
  std::vector<std::byte> pages = std::vector<std::byte>(kPages * kLayout.page_bytes());
  std::vector<std::uint32_t> indices = [] {
    std::vector<std::uint32_t> all(kTokens);
    for (std::uint32_t i = 0; i < kTokens; ++i) all[i] = i;
    return all;
  }();
  std::vector<PageRun> runs = [] {
    std::vector<PageRun> all;
    for (std::uint32_t i = 0; i < kPages; ++i) all.push_back({.page = i, .begin = 0, .end = kPageTokens});
    return all;
  }();
  std::vector<float> floats = std::vector<float>(std::size_t{kTokens} * kShape.q_heads * kShape.head_dim, 0.25f);
  std::vector<float> out = std::vector<float>(std::size_t{kTokens} * kShape.q_heads * kShape.head_dim);
  std::vector<float> lse = std::vector<float>(std::size_t{kTokens} * kShape.q_heads);
  std::vector<std::uint32_t> words = std::vector<std::uint32_t>(std::size_t{kTokens} * kGroup);
  std::vector<FarPage> far_pages;
  std::vector<PrefillChoice> choices = std::vector<PrefillChoice>(kGroup);

  Tensors() {
    for (std::size_t i = 0; i < pages.size() / sizeof(float); ++i)
      reinterpret_cast<float*>(pages.data())[i] = static_cast<float>(i * 2654435761u % 1000) * 1e-3f;
    for (std::uint32_t i = 0; i < kPages; ++i) far_pages.push_back({.block = i, .rows = kPageTokens});
  }
  [[nodiscard]] KvView kv() { return {.base = pages.data(), .frames = indices.data(), .layout = kLayout}; }
  [[nodiscard]] std::byte* bytes_out() { return reinterpret_cast<std::byte*>(out.data()); }
  [[nodiscard]] const std::byte* q() const { return reinterpret_cast<const std::byte*>(floats.data()); }
};

constexpr PrefillShape kStrides{
    .q_token_stride = 8 * 64, .q_head_stride = 64, .out_token_stride = 8 * 64, .out_head_stride = 64};

struct Call {
  const char* name;
  /// Everything but the tensors is of the call's own frame or heap, and gone when it returns or throws.
  std::function<void(const cpu::Workers&, Tensors&)> run;
};

template <class Task>
std::vector<Task> repeat(const Task& task, std::size_t count) {
  return std::vector<Task>(count, task);
}

/// A stage of what goes with the call.
template <class Verb>
std::function<void(const cpu::Workers&, Tensors&)> verb(Verb run) {
  return [run](const cpu::Workers& workers, Tensors& t) {
    const auto stages = std::make_unique<tools::HostStages>(cpu::Host{.workers = workers});
    const auto shape = std::make_unique<AttentionShape>(kShape);
    const auto layout = std::make_unique<PageLayout>(kLayout);
    const auto strides = std::make_unique<PrefillShape>(kStrides);
    run(*stages, t, *shape, *layout, *strides);
  };
}

const std::vector<Call> kCalls{
    {"score_pages", verb([](tools::Stages& stages, Tensors& t, auto& shape, auto&, auto&) {
       const ScorePagesTask task{.q = t.floats.data(), .digests = t.pages.data(), .frames = t.indices.data(), .pages = 2048, .out = t.out.data()};
       std::vector<ScorePagesTask> tasks = repeat(task, 4);
       for (std::uint32_t i = 0; i < 4; ++i) tasks[i].out += i * 2048 * kGroup;
       stages.score_pages(tasks, shape, DType::f32, nullptr);
     })},
    {"top_k", verb([](tools::Stages& stages, Tensors& t, auto&, auto&, auto&) {
       std::vector<TopKTask> tasks;
       for (std::uint32_t i = 0; i < 4; ++i)
         tasks.push_back({.values = std::span(t.floats).subspan(i * 65536, 65536), .k = 64, .out = t.words.data() + i * 64});
       stages.top_k(tasks, nullptr);
     })},
    {"derive",
     [](const cpu::Workers& workers, Tensors& t) {
       const auto verbs = std::make_unique<cpu::ForwardVerbs>(workers);
       derive(*verbs,
              {.kv = t.kv(),
               .tokens = kTokens,
               .codes = t.bytes_out(),
               .mean = nullptr,
               .digests = t.bytes_out() + 8 * MiB / 4},
              t.far_pages, nullptr);
     }},
    {"score_int4", verb([](tools::Stages& stages, Tensors& t, auto& shape, auto& layout, auto&) {
       std::vector<ScoreInt4Task> tasks;
       for (std::uint32_t i = 0; i < 4; ++i)
         tasks.push_back({.q = t.floats.data(), .copies = t.pages.data(), .frames = t.indices.data(), .tokens = kTokens, .out = t.out.data() + i * kTokens * kGroup});
       stages.score_int4(tasks, shape, layout, nullptr);
     })},
    {"top_p", verb([](tools::Stages& stages, Tensors& t, auto&, auto&, auto&) {
       std::vector<TopPTask> tasks;
       for (std::uint32_t i = 0; i < 4; ++i)
         tasks.push_back({.values = std::span(t.floats).subspan(i * 65536, 65536), .p = 0.5f, .mask = t.words.data() + i * 2048});
       stages.top_p(tasks, nullptr);
     })},
    {"attend", verb([](tools::Stages& stages, Tensors& t, auto& shape, auto&, auto&) {
       const AttendTask runs{.q = t.floats.data(), .kv = t.kv(), .runs = t.runs, .tokens = {}, .members = {}, .scores = {}, .out = {.out = t.out.data(), .lse = t.lse.data()}};
       const AttendTask tokens{.q = t.floats.data(), .kv = t.kv(), .runs = {}, .tokens = t.indices, .members = {}, .scores = {}, .out = {.out = t.out.data() + 1024, .lse = t.lse.data() + 64}};
       const std::vector<AttendTask> tasks{runs, tokens};
       stages.attend(tasks, shape, nullptr);
     })},
    {"prefill", verb([](tools::Stages& stages, Tensors& t, auto& shape, auto&, auto& strides) {
       const auto tasks = repeat(PrefillTask{.q = t.q(), .kv = t.kv(), .first = 0, .count = 256, .out = t.bytes_out(), .lse = t.lse.data()}, 1);
       stages.prefill(tasks, strides, shape, nullptr);
     })},
    {"select_blocks", verb([](tools::Stages& stages, Tensors& t, auto& shape, auto&, auto& strides) {
       const auto spec = std::make_unique<PrefillSpec>(
           PrefillSpec{.mode = PrefillMode::flexprefill, .flex = {.min_budget = 256, .max_budget = 512}});
       const auto tasks = repeat(SelectBlocksTask{.q = t.q(), .kv = t.kv(), .first = kTokens - 256, .count = 256, .blocks = t.words.data(), .choices = t.choices.data()}, 1);
       stages.select_blocks(tasks, *spec, strides, shape, nullptr);
     })},
    {"cluster", verb([](tools::Stages& stages, Tensors& t, auto&, auto&, auto&) {
       const auto tasks = repeat(ClusterTask{.kv = t.kv(), .count = kTokens, .clusters = 192, .iterations = 3, .centroids = t.out.data(), .assignment = t.words.data()}, 1);
       stages.cluster(tasks, nullptr);
     })},
    {"read rate", [](const cpu::Workers& workers, Tensors&) { (void)cpu::measure_read_gbps(workers, 4 * MiB); }},
    {"host pool", [](const cpu::Workers& workers, Tensors&) {
       const cpu::Topology topology;
       const auto own = std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 1});
       cpu::HostDevice device(own);
       const cpu::HostPool pool({.layout = kLayout, .bytes = 64 * MiB}, topology, workers, device);
     }}};

}  // namespace

TEST_CASE("a worker that comes back late finds all that its call used", "[cpu][lost]") {
  const auto index = GENERATE(range(std::size_t{0}, kCalls.size()));
  const auto skip = GENERATE(0u, 3u, 7u);
  const bool go_first = skip == 3;  // Before the workers are destroyed, or after.
  const Call& call = kCalls[index];
  CAPTURE(call.name, skip);
  const cpu::Topology topology;
  Tensors tensors;
  Stall stall(skip);
  auto workers = std::make_unique<cpu::Workers>(
      topology, cpu::WorkersOptions{
                    .threads = 3, .pin = false, .timeout = std::chrono::milliseconds(2), .before_body = stall.hook()});
  bool lost = false;
  try {
    call.run(*workers, tensors);
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::timeout);
    lost = true;
  }
  REQUIRE(lost == workers->lost());
  if (skip == 0) REQUIRE(lost);
  if (go_first) stall.let_go();
  workers.reset();
  stall.await_end();
}

TEST_CASE("what workers keep goes with the call that uses it, or at once", "[cpu][lost]") {
  struct Memory final : cpu::Kept {
    explicit Memory(std::shared_ptr<cpu::Workers> its_owner = nullptr) : owner(std::move(its_owner)) {}
    std::shared_ptr<int> alive = std::make_shared<int>(0);
    std::shared_ptr<cpu::Workers> owner;
  };
  const cpu::Topology topology;
  Stall stall;
  auto workers = std::make_shared<cpu::Workers>(
      topology, cpu::WorkersOptions{
                    .threads = 3, .pin = false, .timeout = std::chrono::milliseconds(2), .before_body = stall.hook()});
  const auto keep = [](const cpu::Workers& by, std::unique_ptr<Memory> memory) {
    const std::weak_ptr<int> alive = memory->alive;
    by.keep(std::move(memory));
    return alive;
  };
  REQUIRE(keep(*workers, std::make_unique<Memory>()).expired());  // Nobody is lost.
  REQUIRE_THROWS_AS(workers->parallel_for(2, [](std::uint32_t) {}), Error);
  const std::weak_ptr<int> kept = keep(*workers, std::make_unique<Memory>());
  REQUIRE_FALSE(kept.expired());
  const cpu::Workers& owned = *workers;
  const std::weak_ptr<int> owner = keep(owned, std::make_unique<Memory>(std::move(workers)));
  REQUIRE_FALSE(owner.expired());
  stall.await_end();
  REQUIRE(kept.expired());
  REQUIRE(owner.expired());
}

}  // namespace sluice::test
