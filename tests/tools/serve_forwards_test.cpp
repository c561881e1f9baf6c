// Forwards of `sluice bench serve`: what those that decode are padded to, and that a graph of each is made before there
// is a request.
#include "tools/cli/bench/serve_forwards.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/float16.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forwarding.hpp"
#include "tools/cli/bench/serve_buckets.hpp"

using namespace sluice;
using namespace sluice::tools;
using TokenEngine = sluice::Engine;

namespace {

constexpr std::uint32_t kPage = 16, kLongest = 256, kBatch = 6, kChunk = 64;

/// What was enqueued, enqueued again.
class Again final : public CapturedWork {
 public:
  explicit Again(std::function<void()> enqueue) : enqueue_(std::move(enqueue)) {}
  void replay() override { enqueue_(); }
  [[nodiscard]] std::size_t nodes() const noexcept override { return 1; }

 private:
  std::function<void()> enqueue_;
};

/// Verbs that cannot be enqueued while they are told so.
class BreakingVerbs final : public test::ForwardingVerbs {
 public:
  using ForwardingVerbs::ForwardingVerbs;
  void append(const ForwardMemory& memory, const ForwardLayer& layer) override {
    if (broken) throw Error(Errc::device, "the test lets no layer be enqueued");
    inner_.append(memory, layer);
  }
  bool broken = false;
};

class BreakingDevice final : public test::ForwardingDevice {
 public:
  explicit BreakingDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs; }
  BreakingVerbs verbs;
};

std::shared_ptr<BreakingDevice> make_device() {
  return std::make_shared<BreakingDevice>(std::make_shared<cpu::HostDevice>(
      std::make_shared<const cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2})));
}

EngineOptions options_of(const std::string& policy) {
  EngineOptions options;
  options.policies = {parse_policy(policy)};
  options.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  options.page_tokens = kPage;
  options.sequences = kBatch;
  options.host_bytes = std::uint64_t{kBatch} * kLongest * 1024;
  options.near_bytes = options.host_bytes / 4;
  options.largest = {.decode_rows = kBatch, .prefill_rows = kChunk, .prefills = 2, .max_tokens = kLongest};
  options.timeout = std::chrono::seconds(60);
  return options;
}

/// Three sequences, each a few tokens longer than the page that it begins in, which come and go.
class Server {
 public:
  Server(const std::string& policy, Capturer capturer, std::shared_ptr<Device> device = make_device(),
         Graphs graphs = Graphs::automatic)
      : spec_(parse_policy(policy)),
        device_(std::move(device)),
        stream_(device_->create_stream("test")),
        rows_(*device_, options_of(policy).shape, PromptStructure::vertical_slash, 9, kLongest, kBatch + kChunk),
        engine_(options_of(policy), device_),
        forwards_(engine_, {.device = device_,
                            .stream = *stream_,
                            .rows = rows_,
                            .model = nullptr,
                            .graphs = graphs,
                            .capturer = std::move(capturer)}) {
    forwards_.prepare(spec_);
  }

  void begin(std::uint32_t prompt) {
    lives_.push_back({.sequence = engine_.begin(spec_), .tokens = prompt});
    const ServeItem item{.sequence = lives_.back().sequence, .turn = {.tokens = prompt, .prefill = true}};
    forwards_.run({&item, 1});
  }
  void end_first() {
    engine_.end(lives_.front().sequence);
    lives_.erase(lives_.begin());
  }
  /// A token of each; what was attended for all of them.
  std::vector<float> decode() {
    std::vector<ServeItem> items;
    for (Live& live : lives_)
      items.push_back({.sequence = live.sequence, .turn = {.first = live.tokens++, .output = true}});
    forwards_.run(items);
    const MutableTensorView out = rows_.out();
    std::vector<float> values;
    for (std::uint32_t row = 0; row < items.size(); ++row) {
      for (std::uint32_t head = 0; head < 4; ++head) {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(out.row(row, head));
        for (std::uint32_t i = 0; i < 64; ++i) values.push_back(cpu::bf16_to_float(halves[i]));
      }
    }
    return values;
  }
  /// Everything that comes here in one run.
  std::vector<float> serve() {
    std::vector<float> all;
    const auto steps = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const std::vector<float> values = decode();
        all.insert(all.end(), values.begin(), values.end());
      }
    };
    begin(30);
    steps(4);  // Past the end of a page.
    begin(63);
    begin(17);
    steps(3);
    end_first();
    steps(20);
    begin(64);
    steps(2);
    return all;
  }
  [[nodiscard]] const ServeForwards& forwards() const noexcept { return forwards_; }

 private:
  struct Live {
    SequenceId sequence{};
    std::uint32_t tokens = 0;
  };
  PolicySpec spec_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  ServeRows rows_;
  TokenEngine engine_;
  ServeForwards forwards_;
  std::vector<Live> lives_;
};

}  // namespace

TEST_CASE("forwards that decode are padded to few sizes, the smallest that has room", "[serve]") {
  const DecodeSizes sizes({.rows = 12, .tokens = 8192, .page_tokens = 32});
  CHECK(std::ranges::equal(sizes.rows(), std::vector<std::uint32_t>{1, 2, 4, 8, 12}));
  CHECK(std::ranges::equal(sizes.tokens(), std::vector<std::uint32_t>{1024, 2048, 4096, 8192}));
  CHECK(sizes.of({1, 32}) == DecodeSize{1, 1024});
  CHECK(sizes.of({3, 1024}) == DecodeSize{4, 1024});
  CHECK(sizes.of({9, 1056}) == DecodeSize{12, 2048});
  CHECK(sizes.of({12, 8192}) == DecodeSize{12, 8192});
  CHECK_FALSE(sizes.of({13, 32}));
  CHECK_FALSE(sizes.of({1, 8224}));
  // Short sequences have one length.
  const DecodeSizes few({.rows = 1, .tokens = 96, .page_tokens = 32});
  CHECK(std::ranges::equal(few.rows(), std::vector<std::uint32_t>{1}));
  CHECK(std::ranges::equal(few.tokens(), std::vector<std::uint32_t>{96}));
}

TEST_CASE("what is attended as a whole by itself is not padded to what is not", "[serve]") {
  // Room near for 16K tokens; up to 2,992 all is attended.
  const DecodeSizes some({.rows = 16, .tokens = 8192, .page_tokens = 16, .dense_tokens = 3000, .near_tokens = 16384});
  CHECK(std::ranges::equal(some.tokens(), std::vector<std::uint32_t>{1024, 2048, 2992, 4096, 8192}));
  CHECK(some.of({4, 2500}) == DecodeSize{4, 2992});
  CHECK(some.of({5, 2000}) == DecodeSize{8, 2048});
  CHECK_FALSE(some.of({5, 2500}));                   // 8 * 2,992 tokens are more.
  CHECK(some.of({8, 2500}) == DecodeSize{8, 2992});  // As 8 * 2,500 are by themselves: it is not dense either way.
  CHECK(some.of({16, 4000}) == DecodeSize{16, 4096});
  // Dense attention of everything: those that fit are graphs, the others are enqueued.
  const DecodeSizes all({.rows = 16, .tokens = 8192, .page_tokens = 16, .dense_tokens = 8192, .near_tokens = 32768});
  CHECK(all.of({4, 8192}) == DecodeSize{4, 8192});
  CHECK(all.of({8, 4096}) == DecodeSize{8, 4096});
  CHECK_FALSE(all.of({5, 5000}));
}

TEST_CASE("a graph of each size is there before a request is, and attends what enqueued forwards do", "[serve]") {
  for (const std::string policy : {"sluice | top_k=8 | near=0%,sinks=2,recent=8", "full", "topk"}) {
    CAPTURE(policy);
    std::size_t captured = 0;
    Server enqueued(policy, {});
    Server graphs(policy, [&](void*, const std::function<void()>& enqueue) {
      ++captured;
      return std::make_unique<Again>(enqueue);
    });
    CHECK(captured == 4);  // 1, 2, 4 and 6 rows of one length.
    CHECK(graphs.forwards().replays() == captured);
    const std::vector<float> wanted = enqueued.serve(), got = graphs.serve();
    CHECK(captured == 4);
    CHECK(graphs.forwards().replays() == captured + 29);
    CHECK(enqueued.forwards().replays() == 0);
    REQUIRE(wanted.size() == got.size());
    double apart = 0.0, size = 0.0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      apart = std::max(apart, std::abs(1.0 * wanted[i] - got[i]));
      size = std::max(size, std::abs(1.0 * wanted[i]));
    }
    CHECK(size > 0.1);
    CHECK(apart < 0.02 * size);
  }
}

TEST_CASE("a size of which no graph can be made is enqueued", "[serve]") {
  std::size_t asked = 0;
  Server server("full", [&](void*, const std::function<void()>& enqueue) -> std::unique_ptr<CapturedWork> {
    if (++asked != 1) throw Error(Errc::device, "no more graphs");
    return std::make_unique<Again>(enqueue);
  });
  CHECK(asked == 4);
  CHECK(server.forwards().replays() == 1);
  CHECK(server.forwards().refusal() == "no graph could be made for rows=2, tokens=256: no more graphs");
  for (const float value : server.serve()) REQUIRE(std::isfinite(value));
  CHECK(server.forwards().replays() == 5);  // The first four have one row.
}

TEST_CASE("a forward that cannot be enqueued while it is captured says why, and what to do", "[serve]") {
  const std::shared_ptr<BreakingDevice> device = make_device();
  const Capturer capturer = [&](void*, const std::function<void()>& enqueue) -> std::unique_ptr<CapturedWork> {
    device->verbs.broken = true;
    enqueue();
    return std::make_unique<Again>(enqueue);
  };
  try {
    const Server server("full", capturer, device);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.code() == Errc::device);
    CHECK(std::string(error.what()) ==
          "no graph could be made for rows=1, tokens=256: the test lets no layer be enqueued; "
          "--graphs off enqueues it launch by launch");
  }
}

TEST_CASE("where graphs are asked for, a size of which none can be made is an error", "[serve]") {
  const Capturer capturer = [](void*, const std::function<void()>&) -> std::unique_ptr<CapturedWork> {
    throw Error(Errc::device, "no graphs");
  };
  CHECK_NOTHROW(Server("full", capturer));
  try {
    const Server server("full", capturer, make_device(), Graphs::on);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.code() == Errc::device);
    CHECK(std::string(error.what()) ==
          "no graph could be made for rows=1, tokens=256: no graphs; --graphs off enqueues it launch by "
          "launch");
  }
}
