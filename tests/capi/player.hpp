#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/support/random.hpp"

/// The same calls by either interface, so that results can be compared.
namespace sluice::test::capi {

inline constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

/// [rows, heads, head_dim], compact, as elements of a type.
struct Rows {
  DType dtype = DType::f32;
  std::uint32_t rows = 0;
  std::uint32_t heads = 0;
  std::vector<std::byte> bytes{};

  /// What an output is filled with, so that one that nobody wrote shows.
  static Rows spoilt(DType dtype, std::uint32_t rows, std::uint32_t heads);
  static Rows random(DType dtype, std::uint32_t rows, std::uint32_t heads, Random& random);
};

struct Item {
  std::uint64_t sequence = 0;
  std::uint32_t tokens = 1;
  bool prefill = false;
};

/// Tokens of a row of scores that is given: more than any sequence has.
inline constexpr std::uint32_t kScored = 1024;

/// One layer's tensors. `lse` [rows, q_heads]; empty: none. `rehearsed` likewise, and `scores` [decode_rows, 1,
/// kScored].
struct Layer {
  std::uint32_t index = 0;
  Rows q, k, v, out;
  std::vector<float> lse{};
  Rows rehearsed{};
  std::vector<float> scores{};
};

/// An engine by one of its interfaces. Sequences and forwards are numbers; what is refused ends the test.
class Player {
 public:
  virtual ~Player() = default;
  virtual std::uint64_t begin(const std::string& policy) = 0;
  virtual std::uint64_t begin(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) = 0;
  virtual std::uint32_t match(const std::string& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) = 0;
  virtual void name(std::uint64_t sequence, std::uint32_t first, std::span<const std::int32_t> ids) = 0;
  virtual void preempt(std::uint64_t sequence) = 0;
  /// `policy` empty: that of the sequence.
  virtual std::uint64_t fork(std::uint64_t sequence, std::uint32_t tokens, const std::string& policy) = 0;
  virtual void truncate(std::uint64_t sequence, std::uint32_t tokens) = 0;
  /// q of no rows: none.
  virtual void import_layer(std::uint64_t sequence, const Layer& layer) = 0;
  virtual void end(std::uint64_t sequence) = 0;
  virtual void watch(std::uint64_t sequence, std::span<const std::uint32_t> tokens) = 0;
  virtual std::uint64_t plan(std::span<const Item> items, const Bucket& bucket) = 0;
  virtual void attend(const Bucket& bucket, Layer& layer) = 0;
  virtual void finish(std::uint64_t forward) = 0;
  virtual void cancel(std::uint64_t forward) = 0;
  [[nodiscard]] virtual std::uint32_t tokens(std::uint64_t sequence) = 0;
  [[nodiscard]] virtual std::uint64_t far_bytes(std::uint64_t sequence) = 0;
  [[nodiscard]] virtual bool can_admit(std::uint32_t tokens) = 0;
  /// All figures but times, as numbers in an order. What policies have learnt is there or not: how much room it takes
  /// depends on the threads that looked at it.
  [[nodiscard]] virtual std::vector<double> figures(std::uint64_t sequence) = 0;
};

/// How tensors that are given by C lie in memory.
enum class Layout { compact, strides_said, padded, heads_first, offset };

/// What both engines are made of: enough for every policy of the tests.
[[nodiscard]] EngineOptions options_for(std::span<const std::string> policies);

[[nodiscard]] std::unique_ptr<Player> cpp_player(std::span<const std::string> policies);
[[nodiscard]] std::unique_ptr<Player> c_player(std::span<const std::string> policies, Layout layout = Layout::compact);

}  // namespace sluice::test::capi
