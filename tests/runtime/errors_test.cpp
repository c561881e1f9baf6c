// A mistake of the caller gets an error that names it, and changes nothing.
#include <functional>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};

/// The error's message, after checking its code.
std::string error_of(Errc code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    REQUIRE(std::string(to_string(error.code())) == to_string(code));
    return error.what();
  }
  FAIL("no error was thrown");
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("options out of range are refused by name", "[errors]") {
  const RuntimeOptions good = toy_options(kShape, 100);
  const auto message = [&](const std::function<void(RuntimeOptions&)>& spoil) {
    RuntimeOptions options = good;
    spoil(options);
    return error_of(Errc::invalid_argument, [&] { Runtime runtime(options); });
  };
  REQUIRE(contains(message([](auto& o) { o.page_tokens = 24; }), "page_tokens"));
  REQUIRE(contains(message([](auto& o) { o.page_tokens = 512; }), "page_tokens"));
  REQUIRE(contains(message([](auto& o) { o.host_bytes = 10; }), "host_bytes"));
  REQUIRE(contains(message([](auto& o) { o.near_bytes = 10; }), "near_bytes"));
  REQUIRE(contains(message([](auto& o) { o.shape.q_heads = 5; }), "multiple"));
  REQUIRE(contains(message([](auto& o) { o.shape.head_dim = 20; }), "head_dim"));
  REQUIRE(contains(message([](auto& o) { o.shape.layers = 0; }), "layers"));
  REQUIRE(contains(message([](auto& o) { o.timeout = std::chrono::milliseconds(0); }), "timeout"));
  REQUIRE(contains(message([](auto& o) { o.numa_node = 99; }), "numa_node"));
  REQUIRE(contains(message([](auto& o) { o.prefill_chunk = 0; }), "prefill_chunk"));
}

TEST_CASE("a host pool larger than the machine is refused, not attempted", "[errors]") {
  RuntimeOptions options = toy_options(kShape, 100);
  options.host_bytes = std::uint64_t{1} << 39;
  options.near_bytes = 1 * MiB;
  REQUIRE(contains(error_of(Errc::out_of_capacity, [&] { Runtime runtime(options); }), std::to_string(options.host_bytes)));
}

TEST_CASE("a prompt longer than the host pool changes nothing", "[errors]") {
  const Toy toy(kShape, 200, 1);
  RuntimeOptions options = toy_options(kShape, 96);
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("full"));
  const std::uint32_t free_pages = runtime.info().host_pages_free;
  std::vector<float> out(200 * 4 * 16);
  error_of(Errc::out_of_capacity, [&] {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(layer, 0, 200),
                       .k = toy.k(layer, 0, 200),
                       .v = toy.v(layer, 0, 200),
                       .out = dense_view(out.data(), DType::f32, 200, 4, 16)});
    }
  });
  REQUIRE(runtime.tokens(id) == 0);
  REQUIRE(runtime.info().host_pages_free <= free_pages);
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
}

TEST_CASE("decoding past the host pool fails cleanly and the sequence can end", "[errors]") {
  const Toy toy(kShape, 200, 2);
  RuntimeOptions options = toy_options(kShape, 64);
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("full"));
  prefill(runtime, id, toy, 60, 64);
  std::uint32_t token = 60;
  error_of(Errc::out_of_capacity, [&] {
    for (; token < 200; ++token) step(runtime, id, toy, token);
  });
  REQUIRE(runtime.tokens(id) == token);
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("what must be near has to fit when a sequence begins", "[errors]") {
  RuntimeOptions options = toy_options(kShape, 400);
  options.near_bytes = 6 * options.layout().page_bytes();
  Runtime runtime(options);
  const std::string message =
      error_of(Errc::out_of_capacity, [&] { (void)runtime.begin(parse_policy("streaming:recent=64")); });
  REQUIRE(contains(message, "near_bytes"));
}

TEST_CASE("placement near refuses a sequence that outgrows the near pool", "[errors]") {
  const Toy toy(kShape, 200, 3);
  RuntimeOptions options = toy_options(kShape, 250);
  options.placement = PlacementMode::near;
  options.near_bytes = 24 * options.layout().page_bytes();
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("full"));
  prefill(runtime, id, toy, 190, 64);
  REQUIRE(contains(error_of(Errc::out_of_capacity, [&] { step(runtime, id, toy, 190); }), "placement near"));
  REQUIRE(runtime.tokens(id) == 190);
  runtime.end(id);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("calls out of order and tensors of the wrong shape are refused", "[errors]") {
  const Toy toy(kShape, 40, 4);
  Runtime runtime(toy_options(kShape, 100));
  const SequenceId id = runtime.begin(parse_policy("full"));
  std::vector<float> out(40 * 4 * 16);
  const auto chunk = [&](std::uint32_t layer, std::uint32_t count) {
    return PrefillArgs{.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(0, 0, count),
                       .k = toy.k(0, 0, count),
                       .v = toy.v(0, 0, count),
                       .out = dense_view(out.data(), DType::f32, count, 4, 16)};
  };
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(chunk(1, 8)); }), "layer 1 must follow layer 0"));
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(chunk(2, 8)); }), "2 layers"));
  runtime.prefill(chunk(0, 8));
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(chunk(0, 8)); }), "layer 0"));
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(chunk(1, 4)); }), "layer 1"));
  PrefillArgs wrong = chunk(1, 8);
  wrong.k.heads = 4;
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(wrong); }), "k is [8, 4, 16]"));
  wrong = chunk(1, 8);
  wrong.q.data = nullptr;
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.prefill(wrong); }), "q.data is null"));
  runtime.prefill(chunk(1, 8));
  REQUIRE(runtime.tokens(id) == 8);

  const SequenceId twice[] = {id, id};
  StepArgs args{.layer = LayerId{0},
                .sequences = twice,
                .q = toy.q(0, 0, 2),
                .k = toy.k(0, 0, 2),
                .v = toy.v(0, 0, 2),
                .out = dense_view(out.data(), DType::f32, 2, 4, 16)};
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.step(args); }), "twice"));
}

TEST_CASE("a sequence that was ended is not found", "[errors]") {
  Runtime runtime(toy_options(kShape, 100));
  const SequenceId id = runtime.begin(parse_policy("full"));
  runtime.end(id);
  error_of(Errc::not_found, [&] { runtime.end(id); });
  error_of(Errc::not_found, [&] { (void)runtime.tokens(id); });
  REQUIRE(runtime.begin(parse_policy("full")) != id);
}

TEST_CASE("a budget of nothing is refused", "[errors]") {
  REQUIRE(contains(error_of(Errc::invalid_argument, [] { (void)parse_policy("topk:budget=0"); }), "budget"));
}

TEST_CASE("sizes beyond 32 bits and values that no enumerator has are refused, not cut", "[errors]") {
  const auto refused = [](auto&& change) {
    RuntimeOptions options = toy_options(kShape, 100);
    change(options);
    return error_of(Errc::invalid_argument, [&] { validate(options); });
  };
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.near_bytes = o.layout().page_bytes() << 32; }), "near_bytes"));
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.near_bytes = ~std::uint64_t{0}; }), "near_bytes"));
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.host_bytes = ~std::uint64_t{0}; }), "host_bytes"));
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.host_bytes = o.layout().page_bytes() << 31; }), "host_bytes"));
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.kv_dtype = DType{7}; }), "kv_dtype"));
  REQUIRE(contains(refused([](RuntimeOptions& o) { o.placement = PlacementMode{4}; }), "placement"));

  const auto refused_policy = [](auto&& change) {
    PolicySpec spec = parse_policy("quest");
    change(spec);
    return error_of(Errc::invalid_argument, [&] { validate(spec); });
  };
  REQUIRE(contains(refused_policy([](PolicySpec& s) { s.estimate = Estimate{2}; }), "estimate"));
  REQUIRE(contains(refused_policy([](PolicySpec& s) { s.budget.kind = BudgetKind{5}; }), "budget.kind"));
  REQUIRE(contains(refused_policy([](PolicySpec& s) { s.budget.rule = ProgressRule{4}; }), "budget.rule"));
  REQUIRE(contains(refused_policy([](PolicySpec& s) { s.pages.digest = DigestKind{2}; }), "pages.digest"));

  Runtime runtime(toy_options(kShape, 100));
  REQUIRE(contains(error_of(Errc::invalid_argument,
                            [&] { (void)runtime.begin(parse_policy("full"), {.mode = PrefillMode{3}, .flex = {}}); }),
                   "mode"));
  const SequenceId id = runtime.begin(parse_policy("full"));
  const Toy toy(kShape, 8, 4);
  std::vector<float> out(std::size_t{kShape.q_heads} * kShape.head_dim);
  StepArgs args{.layer = LayerId{0},
                .sequences = {&id, 1},
                .q = toy.q(0, 0, 1),
                .k = toy.k(0, 0, 1),
                .v = toy.v(0, 0, 1),
                .out = dense_view(out.data(), DType::f32, 1, kShape.q_heads, kShape.head_dim)};
  args.out.dtype = DType{3};
  REQUIRE(contains(error_of(Errc::invalid_argument, [&] { runtime.step(args); }), "out.dtype"));

  // As many tokens as 32 bits hold, and one more than that behind what is there.
  ImportArgs import{.sequence = id, .layer = LayerId{0}, .k = toy.k(0, 0, 4), .v = toy.v(0, 0, 4), .last_q = {}};
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    import.layer = LayerId{layer};
    runtime.import_prefix(import);
  }
  import.layer = LayerId{0};
  for (const std::uint32_t tokens : {0xffff'ffffu, 0xffff'fffdu, 0x8000'0000u}) {
    import.k.tokens = import.v.tokens = tokens;
    REQUIRE(contains(error_of(Errc::out_of_capacity, [&] { runtime.import_prefix(import); }), std::to_string(tokens + 4ull)));
  }
  REQUIRE(runtime.tokens(id) == 4);
}
