// Heads of parked sequences that are made of the input, with checksums that are right: most are sound, some have a
// number that cannot be. What is refused changes nothing in the engine; what is resumed has what its head says,
// decodes, can be parked again, and leaves nothing behind.

#include <array>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.hpp"
#include "sluice/page_rules.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tests/support/park_seal.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr std::string_view kModel = "model";
constexpr const char* kPolicies[] = {
    "full:near=0",   "lfps",  "sluice", "streaming", "topk",   "exact | int4 | top_p=0.9 | near=0",
    "none | near=0", "quest", "psa",    "magicpig",  "snapkv", "no policy"};
constexpr std::size_t kBodyBytes = 64 * 1024;  ///< longer ones are of heads that say what cannot be

/// Numbers from the input's bytes, 0 behind its end.
class Numbers {
 public:
  explicit Numbers(std::string_view text) : text_(text) {}
  std::uint32_t below(std::uint32_t limit) { return byte() % limit; }
  /// One of [0, limit), now and then one that is not.
  std::uint32_t mostly_below(std::uint32_t limit) {
    constexpr std::uint32_t kOdd[] = {0x7fff'ffffu, 0x8000'0000u, 0xffff'ffffu, 65'536u};
    const std::uint32_t first = byte();
    return first < 250 ? first % limit : kOdd[first % std::size(kOdd)];
  }
  std::string_view text(std::size_t most) {
    const std::string_view taken = text_.substr(at_, most);
    at_ += taken.size();
    return taken;
  }

 private:
  std::uint32_t byte() { return at_ == text_.size() ? 0 : static_cast<unsigned char>(text_[at_++]); }
  std::string_view text_;
  std::size_t at_ = 0;
};

/// Keeps nothing of sequences that have ended.
std::unique_ptr<Engine> engine_of(const std::vector<std::uint32_t>& windows, DType dtype, std::uint32_t page_tokens) {
  EngineOptions options{.shape = {.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 16},
                        .windows = windows,
                        .page_tokens = page_tokens,
                        .kv_dtype = dtype,
                        .host_bytes = 128 * KiB,
                        .near_bytes = 16 * KiB,
                        .policies = {parse_policy("sluice"), parse_policy("labels:channels=8 | top_k=all | near=0"),
                                     parse_policy("quest")},
                        .largest = {.decode_rows = 1, .top_k = true, .unbounded = true},
                        .sequences = 2,
                        .cpu_sequences = 2,
                        .prefix_bytes = 0,
                        .threads = 1,
                        .pin_threads = false};
  auto built = std::make_unique<Engine>(options);
  const std::int32_t id = 1;
  built->end(built->begin(parse_policy("full:near=0"), std::span(&id, 1)));  // What names take is there.
  return built;
}

Engine& engine(std::uint32_t i) {
  static const std::array engines{engine_of({}, DType::f32, 8), engine_of({16, 0}, DType::bf16, 8),
                                  engine_of({24, 16}, DType::fp8_e4m3, 16)};
  return *engines[i % engines.size()];
}

runtime::ParkHead head_of(Numbers& numbers, const EngineOptions& options) {
  runtime::ParkHead head{.shape = options.shape, .dtype = options.kv_dtype};
  if (numbers.below(32) == 1) head.shape.layers = numbers.below(4);
  head.tokens = numbers.mostly_below(60);
  head.prompt_end = numbers.below(4) == 1 ? numbers.mostly_below(70) : head.tokens;
  if (numbers.below(2) == 1) head.sparse = numbers.mostly_below(60);
  head.tail_end = numbers.below(4) == 1 ? numbers.mostly_below(70) : head.tokens;
  head.tail_begin = head.tail_end - std::min(head.tail_end, numbers.below(12));
  head.names = numbers.mostly_below(70);
  head.salt = numbers.below(256);
  head.balance = numbers.below(256);
  head.chunk_end = numbers.mostly_below(70);
  head.prefill.mode = static_cast<PrefillMode>(numbers.below(6));
  head.model = numbers.below(16) == 1 ? "another model" : kModel;
  head.policy = kPolicies[numbers.below(std::size(kPolicies))];
  head.policy_name = numbers.text(numbers.below(9));
  if (numbers.below(4) == 1) head.rests.resize(numbers.below(4), numbers.below(256));
  head.windows = options.windows;
  if (!head.windows.empty()) head.windows.resize(std::max(head.shape.layers, 2u));
  if (numbers.below(4) == 1) head.windows.assign(std::max(head.shape.layers, 2u), numbers.mostly_below(40));
  if (!head.windows.empty()) head.passed = numbers.mostly_below(40);
  return head;
}

std::vector<std::byte> forged(const runtime::ParkHead& head, std::string_view text) {
  std::vector<std::byte> bytes = runtime::encode(head);
  const std::size_t body = std::min<std::uint64_t>(runtime::parked_body_bytes(head.body_bytes()), kBodyBytes);
  for (std::size_t i = 0; i < body; ++i)
    bytes.push_back(text.empty() ? std::byte{0} : static_cast<std::byte>(text[i % text.size()]));
  seal(bytes);
  return bytes;
}

std::uint32_t window_of(const std::vector<std::uint32_t>& windows, std::uint32_t layer) {
  return windows.empty() ? 0 : windows[layer];
}

/// Near pages stay until others take their place.
bool same(const EngineMemoryUse& a, const EngineMemoryUse& b) {
  return a.host() == b.host() && a.device() == b.device() && a.far_pages_used == b.far_pages_used &&
         a.far_pages_cached == b.far_pages_cached;
}

std::vector<std::byte> parked(Engine& of, SequenceId id) {
  std::vector<std::byte> area(of.park_bytes(id, kModel));
  FUZZ_REQUIRE(of.park(id, area, kModel) == area.size());
  return area;
}

/// Of whatever it has attended, such as what is no number.
void decode(Engine& of, SequenceId id) {
  const AttentionShape& shape = of.options().shape;
  const Bucket& bucket = of.options().largest;
  const std::uint32_t tokens = of.tokens(id);
  std::array<float, 32> q{}, k{}, v{}, out{};
  const PlanItem item{.sequence = id, .tokens = 1};
  Batch batch{};
  if (!accepts([&] { batch = of.plan({&item, 1}, bucket, nullptr); })) return;  // It may be as long as one can be.
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto view = [](auto& rows, std::uint32_t heads) { return dense_view(rows.data(), DType::f32, 1, heads, 16); };
    of.attend(bucket, LayerId{layer}, view(q, 2), view(k, 1), view(v, 1), view(out, 2), nullptr);
  }
  of.finish(batch);
  FUZZ_REQUIRE(of.tokens(id) == tokens + 1);
}

void check(Engine& of, const runtime::ParkHead& head, const std::vector<std::byte>& bytes) {
  SequenceId id{};
  if (!accepts([&] { id = of.resume(bytes, kModel); })) return;
  FUZZ_REQUIRE(head.model == kModel && head.shape == of.options().shape);
  for (std::uint32_t layer = 0; layer < head.shape.layers; ++layer)
    FUZZ_REQUIRE(window_of(head.windows, layer) == window_of(of.options().windows, layer));
  FUZZ_REQUIRE(of.tokens(id) == head.tokens);
  const std::vector<std::byte> area = parked(of, id);
  of.end(id);
  id = of.resume(area, kModel);
  FUZZ_REQUIRE(parked(of, id) == area);
  decode(of, id);
  of.end(id);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  Numbers numbers(text);
  Engine& of = engine(numbers.below(3));
  const runtime::ParkHead head = head_of(numbers, of.options());
  const std::vector<std::byte> bytes = forged(head, text);
  EngineMemoryUse before = of.memory();
  check(of, head, bytes);
  if (!same(of.memory(), before)) {  // What decodes for the first time makes room, once.
    before = of.memory();
    check(of, head, bytes);
  }
  FUZZ_REQUIRE(same(of.memory(), before));
  return 0;
}
