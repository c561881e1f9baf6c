#include "runtime/park/park_head.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <type_traits>

#include "cpu/machine/crc32c.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

static_assert(std::endian::native == std::endian::little,
              "parked sequences are little-endian and are read as they are");

constexpr std::array<unsigned char, 8> kMagic{0x89, 'S', 'L', 'U', 'I', 'C', 'E', '\n'};
constexpr std::uint64_t kPreambleBytes = 32;
constexpr std::uint64_t kMostHeadBytes = 64 * KiB;
constexpr std::uint64_t kMostBodyBytes = std::uint64_t{1} << 62;
constexpr std::uint32_t kLines = 1, kFlattened = 2;  ///< bits of how blocks of prompts are chosen
constexpr std::uint64_t kMostQueries = 256;          ///< EngineSizes::prompt_queries, at most

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Errc::corrupt, "this is no parked sequence, or it is damaged: " + why + "; take another copy of it");
}

class Encoder {
 public:
  template <class T>
  void put(T number) {
    static_assert(std::is_arithmetic_v<T>);
    const auto* const from = reinterpret_cast<const std::byte*>(&number);
    bytes.insert(bytes.end(), from, from + sizeof number);
  }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    const auto* const from = reinterpret_cast<const std::byte*>(text.data());
    bytes.insert(bytes.end(), from, from + text.size());
  }
  void check(std::size_t begin) { put(cpu::crc32c(std::span(bytes).subspan(begin))); }

  std::vector<std::byte> bytes;
};

/// Throws rather than read behind the end.
class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T number() {
    T number{};
    const auto from = take(sizeof number);
    std::memcpy(&number, from.data(), sizeof number);
    return number;
  }
  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::string text() {
    const auto from = take(u32());
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) refuse("its head is shorter than what is in it");
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

  std::span<const std::byte> bytes_;
};

struct Preamble {
  std::uint32_t head_bytes = 0;
  std::uint64_t body_bytes = 0;
};

void require_checked(std::span<const std::byte> checked, const char* what) {
  const auto bytes = checked.first(checked.size() - sizeof(std::uint32_t));
  if (Decoder(checked.subspan(bytes.size())).u32() != cpu::crc32c(bytes))
    refuse(std::string("the checksum of its ") + what + " is wrong");
}

Preamble read_preamble(ParkSource& source) {
  if (source.bytes() < kPreambleBytes)
    refuse("it has " + std::to_string(source.bytes()) + " bytes, and the shortest has more");
  std::vector<std::byte> scratch;
  const auto bytes = source.read(0, kPreambleBytes, scratch);
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) refuse("it begins as something else");
  require_checked(bytes, "beginning");
  Decoder fields(bytes.subspan(kMagic.size()));
  if (const std::uint32_t version = fields.u32(); version != kParkVersion)
    throw Error(Errc::invalid_argument, "the sequence was parked in version " + std::to_string(version) +
                                            " of the format, and this library reads version " +
                                            std::to_string(kParkVersion) +
                                            "; resume it with the library that parked it");
  Preamble preamble{.head_bytes = fields.u32()};
  preamble.body_bytes = fields.number<std::uint64_t>();
  if (preamble.head_bytes > kMostHeadBytes) refuse("its head is too long");
  return preamble;
}

StreamingPrefillSpec read_streaming(Decoder& fields) { return {.sinks = fields.u32(), .window = fields.u32()}; }

MInferenceSpec read_minference(Decoder& fields) {
  MInferenceSpec spec{.pattern = static_cast<HeadPattern>(std::min(fields.u32(), 255u))};
  for (std::uint32_t* field : {&spec.columns, &spec.diagonals, &spec.blocks}) *field = fields.u32();
  spec.a_shape = read_streaming(fields);
  return spec;
}

void put(Encoder& fields, const StreamingPrefillSpec& spec) {
  fields.put(spec.sinks);
  fields.put(spec.window);
}

void put(Encoder& fields, const MInferenceSpec& spec) {
  for (const std::uint32_t field :
       {static_cast<std::uint32_t>(spec.pattern), spec.columns, spec.diagonals, spec.blocks})
    fields.put(field);
  put(fields, spec.a_shape);
}

ParkHead decode(std::span<const std::byte> bytes) {
  Decoder fields(bytes);
  ParkHead head;
  head.shape = {.layers = fields.u32(), .q_heads = fields.u32(), .kv_heads = fields.u32(), .head_dim = fields.u32()};
  const std::uint32_t dtype = fields.u32();
  head.dtype = static_cast<DType>(std::min(dtype, 255u));
  for (std::uint32_t* field :
       {&head.tokens, &head.prompt_end, &head.sparse, &head.tail_begin, &head.tail_end, &head.names})
    *field = fields.u32();
  head.salt = fields.number<std::uint64_t>();
  head.balance = fields.number<double>();
  head.chunk_end = fields.u32();
  head.prefill.mode = static_cast<PrefillMode>(std::min(fields.u32(), 255u));
  head.prefill.flex = {.gamma = fields.number<float>(), .tau = fields.number<float>()};
  head.prefill.flex.min_budget = fields.u32();
  head.prefill.flex.max_budget = fields.u32();
  const std::uint32_t forms = fields.u32();
  if (forms > (kLines | kFlattened)) refuse("its choice of blocks cannot be");
  head.prefill.flex.lines = (forms & kLines) != 0;
  head.prefill.flex.flattened = (forms & kFlattened) != 0;
  // Of these modes alone, so that other sequences are what earlier versions read and wrote.
  if (head.prefill.mode == PrefillMode::streaming) head.prefill.streaming = read_streaming(fields);
  if (head.prefill.mode == PrefillMode::minference) head.prefill.minference = read_minference(fields);
  head.model = fields.text();
  head.policy = fields.text();
  head.policy_name = fields.text();
  const auto numbers = [&fields] {
    const std::uint32_t count = fields.u32();
    if (count > fields.left() / sizeof(std::uint32_t)) refuse("its head has another length than what is in it");
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 0; i < count; ++i) found.push_back(fields.u32());
    return found;
  };
  head.rests = numbers();
  head.passed = fields.u32();
  head.windows = numbers();
  if (fields.left() != 0) refuse("its head has another length than what is in it");
  return head;
}

std::vector<std::byte> encode_fields(const ParkHead& head) {
  Encoder fields;
  for (const std::uint32_t field : {head.shape.layers, head.shape.q_heads, head.shape.kv_heads, head.shape.head_dim,
                                    static_cast<std::uint32_t>(head.dtype), head.tokens, head.prompt_end, head.sparse,
                                    head.tail_begin, head.tail_end, head.names})
    fields.put(field);
  fields.put(head.salt);
  fields.put(head.balance);
  fields.put(head.chunk_end);
  const FlexPrefillSpec& flex = head.prefill.flex;
  fields.put(static_cast<std::uint32_t>(head.prefill.mode));
  for (const float field : {flex.gamma, flex.tau}) fields.put(field);
  const std::uint32_t forms = (flex.lines ? kLines : 0) | (flex.flattened ? kFlattened : 0);
  for (const std::uint32_t field : {flex.min_budget, flex.max_budget, forms}) fields.put(field);
  if (head.prefill.mode == PrefillMode::streaming) put(fields, head.prefill.streaming);
  if (head.prefill.mode == PrefillMode::minference) put(fields, head.prefill.minference);
  for (const std::string* text : {&head.model, &head.policy, &head.policy_name}) fields.put(*text);
  const auto put_numbers = [&fields](const std::vector<std::uint32_t>& numbers) {
    fields.put(static_cast<std::uint32_t>(numbers.size()));
    for (const std::uint32_t number : numbers) fields.put(number);
  };
  put_numbers(head.rests);
  fields.put(head.passed);
  put_numbers(head.windows);
  return std::move(fields.bytes);
}

/// First token that the next one sees in some layer with a window; 0: there is no such layer.
std::uint32_t first_seen(const ParkHead& head) {
  const std::uint32_t widest = head.windows.empty() ? 0 : std::ranges::max(head.windows);
  return widest == 0 || widest > head.tokens ? 0 : head.tokens + 1 - widest;
}

}  // namespace

PrefillSpec prefill_of(const PrefillSpec& spec) noexcept {
  PrefillSpec used{.mode = spec.mode};
  if (spec.mode == PrefillMode::flexprefill || spec.mode == PrefillMode::automatic) used.flex = spec.flex;
  if (spec.mode == PrefillMode::streaming) used.streaming = spec.streaming;
  if (spec.mode == PrefillMode::minference) used.minference = spec.minference;
  return used;
}

/// So that lengths can be computed from it, and nothing in it misleads an engine.
std::string unsound(const ParkHead& head) {
  try {
    sluice::validate(head.shape);
    sluice::validate(head.prefill);
  } catch (const Error& error) {
    return error.what();
  }
  std::string why;
  const auto require = [&why](bool holds, const char* what) {
    if (!holds && why.empty()) why = std::string("its ") + what + " cannot be";
  };
  require(is_valid(head.dtype), "element type");
  require(head.tokens <= 0x7fff'ffffu && head.names <= 0x7fff'ffffu, "length");
  require(head.prompt_end <= head.tokens, "prompt");
  require(head.tail_begin <= head.tail_end && head.tail_end <= head.tokens, "range of queries");
  require(head.tail_end - head.tail_begin <= kMostQueries, "number of queries");
  require(head.sparse == kNone || head.sparse < head.tokens, "first sparse token");
  require(std::isfinite(head.balance), "balance");
  require(head.rests.empty() || head.rests.size() == head.shape.layers, "number of rests");
  require(head.windows.empty() || head.windows.size() == head.shape.layers, "number of windows");
  require(head.passed <= first_seen(head), "first token of windows");
  require(head.model.size() <= kMostModelBytes, "model");
  if (!why.empty()) return why;
  // What its fields take, told without writing them.
  const std::uint64_t numbers = (head.rests.size() + head.windows.size()) * sizeof(std::uint32_t);
  const std::uint64_t texts = head.model.size() + head.policy.size() + head.policy_name.size();
  ParkHead others;
  others.prefill = head.prefill;
  if (const std::uint64_t bytes = encode_fields(others).size() + texts + numbers; bytes > kMostHeadBytes)
    return "its head has " + std::to_string(bytes) + " bytes, of which policy and name take " +
           std::to_string(head.policy.size() + head.policy_name.size()) + ", and may have " +
           std::to_string(kMostHeadBytes);
  return why;
}

std::vector<std::byte> encode(const ParkHead& head) {
  const std::vector<std::byte> fields = encode_fields(head);
  Encoder all;
  for (const unsigned char byte : kMagic) all.put(byte);
  all.put(kParkVersion);
  all.put(static_cast<std::uint32_t>(fields.size()));
  all.put(head.body_bytes());
  all.put(std::uint32_t{0});
  all.check(0);
  all.bytes.insert(all.bytes.end(), fields.begin(), fields.end());
  all.check(kPreambleBytes);
  return std::move(all.bytes);
}

ParkHead read_head(ParkSource& source) {
  const Preamble preamble = read_preamble(source);
  const std::uint64_t head_bytes = preamble.head_bytes + sizeof(std::uint32_t);
  // What cannot be is not computed with: its checksums would make a number of 64 bits wrap around.
  if (preamble.body_bytes > kMostBodyBytes) refuse("it says that it has more bytes than a file may have");
  const std::uint64_t said = kPreambleBytes + head_bytes + parked_body_bytes(preamble.body_bytes);
  if (source.bytes() != said)
    refuse("it has " + std::to_string(source.bytes()) + " bytes, and says that it has " + std::to_string(said) +
           (source.bytes() < said ? ": it was cut" : ": something was written behind it"));
  std::vector<std::byte> scratch;
  const auto bytes = source.read(kPreambleBytes, head_bytes, scratch);
  require_checked(bytes, "head");
  ParkHead head = decode(bytes.first(preamble.head_bytes));
  if (const std::string why = unsound(head); !why.empty()) refuse(why);
  if (head.body_bytes() != preamble.body_bytes) refuse("its head says another length than its beginning");
  return head;
}

}  // namespace sluice::runtime
