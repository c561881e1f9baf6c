// What the C interface gives is what the C++ interface gives, to the last bit.
#include "tests/capi/player.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::capi;

namespace {

const std::string kSluice = "exact | int4 | top_p=0.9 | near=0";

/// What a run gave: all outputs and log-sums, and numbers asked for between.
struct Trace {
  std::vector<std::byte> bytes;
  std::vector<double> numbers;

  void add(const Layer& layer) {
    bytes.insert(bytes.end(), layer.out.bytes.begin(), layer.out.bytes.end());
    const auto* const lse = reinterpret_cast<const std::byte*>(layer.lse.data());
    bytes.insert(bytes.end(), lse, lse + layer.lse.size() * sizeof(float));
  }
};

/// Plays what a test says on an engine, with numbers that depend on the call alone.
class Play {
 public:
  Play(Player& player, DType dtype) : player_(player), dtype_(dtype) {}

  Player* operator->() { return &player_; }
  Trace& trace() { return trace_; }

  [[nodiscard]] Layer layer(std::uint32_t index, std::uint32_t rows, std::uint32_t queries) {
    return {.index = index,
            .q = Rows::random(dtype_, queries, kShape.q_heads, random_),
            .k = Rows::random(dtype_, rows, kShape.kv_heads, random_),
            .v = Rows::random(dtype_, rows, kShape.kv_heads, random_),
            .out = Rows::spoilt(dtype_, rows, kShape.q_heads)};
  }

  void enqueue(const Bucket& bucket) {
    for (std::uint32_t index = 0; index < kShape.layers; ++index) {
      Layer each = layer(index, bucket.rows(), bucket.rows());
      if (index == 0) each.lse.assign(std::size_t{bucket.rows()} * kShape.q_heads, 1e4f);
      if (index != 0 && bucket.rehearsed) each.rehearsed = Rows::random(dtype_, bucket.rows(), kShape.q_heads, random_);
      if (bucket.scores) {
        each.scores.resize(std::size_t{bucket.decode_rows} * kScored);
        for (float& score : each.scores) score = static_cast<float>(random_.normal());
      }
      player_.attend(bucket, each);
      trace_.add(each);
    }
  }
  void forward(std::vector<Item> items, const Bucket& bucket) {
    const std::uint64_t number = player_.plan(items, bucket);
    enqueue(bucket);
    player_.finish(number);
    for (const Item& item : items) note(item.sequence);
  }
  void import(std::uint64_t sequence, std::uint32_t tokens, std::uint32_t queries) {
    for (std::uint32_t index = 0; index < kShape.layers; ++index)
      player_.import_layer(sequence, layer(index, tokens, queries));
    note(sequence);
  }
  void note(std::uint64_t sequence) {
    trace_.numbers.push_back(static_cast<double>(sequence));
    trace_.numbers.push_back(player_.tokens(sequence));
    trace_.numbers.push_back(static_cast<double>(player_.far_bytes(sequence)));
    const std::vector<double> figures = player_.figures(sequence);
    trace_.numbers.insert(trace_.numbers.end(), figures.begin(), figures.end());
    for (const std::uint32_t tokens : {1u, 100u, 400u, 512u, 513u})
      trace_.numbers.push_back(player_.can_admit(tokens) ? 1.0 : 0.0);
  }

 private:
  Player& player_;
  DType dtype_;
  Random random_{7};
  Trace trace_;
};

template <class Script>
Trace played(std::unique_ptr<Player> player, const Script& script, DType dtype) {
  Play play(*player, dtype);
  script(play);
  return std::move(play.trace());
}

void require_equal(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    CAPTURE(i);
    REQUIRE(got[i] == want[i]);
  }
}

/// How many words differ: where it is nearly all of them, another kernel computed them.
std::size_t differences(const std::vector<std::byte>& got, const std::vector<std::byte>& want) {
  std::size_t count = 0;
  for (std::size_t i = 0; i + 4 <= std::min(got.size(), want.size()); i += 4)
    count += std::memcmp(&got[i], &want[i], 4) != 0 ? 1 : 0;
  return count;
}

/// By both interfaces the script gives the same, and something.
template <class Script>
void require_same(const std::vector<std::string>& policies, const Script& script, DType dtype = DType::f32,
                  Layout layout = Layout::compact) {
  const Trace want = played(cpp_player(policies), script, dtype);
  const Trace got = played(c_player(policies, layout), script, dtype);
  REQUIRE(want.bytes.size() > 1000);
  REQUIRE(std::ranges::count(want.bytes, std::byte{0}) < static_cast<std::ptrdiff_t>(want.bytes.size() / 2));
  require_equal(got.numbers, want.numbers);
  CHECK(differences(got.bytes, want.bytes) == 0);
  REQUIRE((got.bytes == want.bytes));
}

Bucket with_features(const std::string& policy, Bucket bucket) {
  const Bucket all = resolved(options_for(std::vector{policy})).largest;
  bucket.top_k = all.top_k, bucket.unbounded = all.unbounded, bucket.pages = all.pages;
  bucket.rehearsed = all.rehearsed, bucket.scores = all.scores;
  return bucket;
}

/// A prompt in chunks, tokens decoded beside another prompt, and drafts where a policy takes them.
void serve(Play& play, const std::string& policy, std::uint32_t drafts) {
  const Bucket mixed = with_features(policy, {.decode_rows = 1, .prefill_rows = 100, .prefills = 2});
  const Bucket decode = with_features(policy, {.decode_rows = 4, .max_tokens = 256});
  const std::uint64_t a = play->begin(policy), b = play->begin(policy);
  play.forward({{a, 90, true}}, mixed);
  play.forward({{a, 40, true}, {b, 60, true}}, mixed);
  play.forward({{a}, {b, 70, true}}, mixed);
  for (int step = 0; step < 5; ++step) play.forward({{b}, {a, drafts}}, decode);
  if (drafts == 1) return;
  const Bucket teams = with_features(policy, {.decode_rows = 4, .drafts = 2, .max_tokens = 256});
  for (int step = 0; step < 3; ++step) play.forward({{b}, {a, 2}}, teams);
}

}  // namespace

TEST_CASE("C gives what C++ gives: prompts, decoding and batches", "[capi]") {
  const auto [policy, drafts] =
      GENERATE(table<std::string, std::uint32_t>({{kSluice, 3},
                                                  {"full | near=0", 2},
                                                  {"none", 2},
                                                  {"exact | int4 | top_k=16 | near=0", 2},
                                                  {"pages:min_pages=2 | int4 | top_p=0.9 | near=0", 2},
                                                  {"pages:digest=box,min_pages=2 | top_k=all | near=0", 2},
                                                  {"lfps | near=0", 1},
                                                  {"exact | top_k=16 | near=0", 1},
                                                  {"scores | top_k=16 | near=0", 2},
                                                  {"infinigen:alpha=2 | dense=1", 1}}));
  CAPTURE(policy);
  require_same({policy}, [&](Play& play) { serve(play, policy, drafts); });
}

TEST_CASE("C gives what C++ gives, in every type and however tensors lie", "[capi]") {
  const auto [dtype, layout] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16},
                    std::array{Layout::compact, Layout::strides_said, Layout::padded, Layout::heads_first,
                               Layout::offset}));
  CAPTURE(to_string(dtype), static_cast<int>(layout));
  require_same(
      {kSluice}, [](Play& play) { serve(play, kSluice, 3); }, dtype, layout);
}

TEST_CASE("C gives what C++ gives: fork, truncate, import, cancel and end", "[capi]") {
  const std::string history = "lfps | near=0";
  const Bucket decode = with_features(kSluice, {.decode_rows = 4});
  const Layout layout = GENERATE(Layout::compact, Layout::heads_first);
  const auto script = [&](Play& play) {
    const std::uint64_t a = play->begin(kSluice);
    play.import(a, 120, 0);
    play.forward({{a, 3}}, decode);
    const std::uint64_t b = play->fork(a, 100, "");
    const std::uint64_t c = play->fork(a, 50, "full | near=0");
    play.forward({{a}, {b}, {c}}, decode);
    play->truncate(a, 121);
    play.note(a);
    play.forward({{b, 2}, {a}}, decode);
    const std::uint64_t taken_back = play->plan(std::vector<Item>{{b}}, decode);
    play.enqueue(decode);
    play->cancel(taken_back);
    play.note(b);
    play->end(c);
    play.forward({{a}, {b}}, decode);
    const std::uint64_t d = play->begin(history);  // Begins with queries, which an import may bring.
    play.import(d, 100, 32);
    for (int step = 0; step < 3; ++step) play.forward({{d}, {a}}, decode);
  };
  require_same({kSluice, history, "full | near=0"}, script, DType::f32, layout);
}

TEST_CASE("C gives what C++ gives: prompts that are known in part, and sequences that rest", "[capi]") {
  const Bucket whole = with_features(kSluice, {.decode_rows = 1, .prefill_rows = 90, .prefills = 1});
  const Bucket rest = with_features(kSluice, {.decode_rows = 1, .prefill_rows = 10, .prefills = 1});
  const Bucket decode = with_features(kSluice, {.decode_rows = 2});
  std::vector<std::int32_t> ids(90);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * i % 31);
  const auto script = [&](Play& play) {
    const auto matched = [&](std::uint64_t salt, std::uint32_t want) {
      REQUIRE(play->match(kSluice, ids, salt) == want);
    };
    matched(5, 0);
    const std::uint64_t a = play->begin(kSluice, ids, 5);
    play.forward({{a, 90, true}}, whole);
    const std::int32_t decoded[] = {7, 8};
    play->name(a, 90, decoded);
    matched(5, 80);  // Whole pages of 16.
    matched(6, 0);
    play->preempt(a);
    const std::uint64_t b = play->begin(kSluice, ids, 5);
    REQUIRE(play->tokens(b) == 80);
    play.note(b);
    play.forward({{b, 10, true}}, rest);
    play.forward({{a}, {b}}, decode);
    play->end(a);
    play->end(b);
    matched(5, 80);
  };
  require_same({kSluice}, script);
}

TEST_CASE("C tells of an audit what C++ tells", "[capi]") {
  const std::string policy = GENERATE("exact | int4 | top_k=8 | near=0", "lfps | near=0");
  const auto script = [&](Play& play) {
    const std::uint64_t a = play->begin(policy);
    const std::uint32_t watched[] = {3, 40, 41, 42, 80};
    play->watch(a, watched);
    play.forward({{a, 100, true}}, with_features(policy, {.decode_rows = 1, .prefill_rows = 100, .prefills = 1}));
    Bucket audited = with_features(policy, {.decode_rows = 2});
    audited.audit = true;
    for (int step = 0; step < 4; ++step) play.forward({{a}}, audited);
    play->watch(a, {});
    play.forward({{a}}, audited);
  };
  require_same({policy}, script);
}

TEST_CASE("what an audit tells in C is not nothing", "[capi]") {
  const std::unique_ptr<Player> player = c_player(std::vector{kSluice});
  Play play(*player, DType::f32);
  const std::uint64_t a = play->begin(kSluice);
  play.import(a, 100, 0);
  const std::size_t without = player->figures(a).size();
  Bucket audited = with_features(kSluice, {.decode_rows = 1});
  audited.audit = true;
  play.forward({{a}}, audited);
  const std::vector<double> figures = player->figures(a);
  REQUIRE(figures.size() == without + std::size_t{kShape.layers} * kShape.q_heads * 11);
  REQUIRE(figures[without] == 1.0);     // Of the first head one step,
  REQUIRE(figures[without + 3] > 0.5);  // whose coverage top_p sees to.
}
