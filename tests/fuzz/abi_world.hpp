#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "sluice.h"
#include "tests/support/random.hpp"

/// An engine of the C interface, and what its sequences should have: calls are made of an input's bytes, and every
/// output is held against float64.
namespace sluice::test::abi {

inline constexpr std::uint32_t kLayers = 2, kQHeads = 4, kKvHeads = 2, kHeadDim = 16, kRows = 4, kPromptRows = 16;

/// Numbers from the input's bytes; 0 behind its end.
class Bytes {
 public:
  explicit Bytes(std::string_view text) : text_(text) {}
  [[nodiscard]] bool left() const noexcept { return at_ < text_.size(); }
  std::uint32_t next() { return left() ? static_cast<unsigned char>(text_[at_++]) : 0; }
  std::uint32_t below(std::uint32_t limit) { return next() % limit; }
  /// Such as no caller that is right would give.
  std::uint64_t odd() {
    const std::uint32_t shift = next() % 64;
    return (std::uint64_t{1} << shift) - next() % 3;
  }
  std::string_view text(std::size_t most) {
    const std::string_view taken = text_.substr(at_, most);
    at_ += taken.size();
    return taken;
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
};

struct DestroyEngine {
  void operator()(sluice_engine* engine) const { sluice_engine_destroy(engine); }
};

class World {
 public:
  enum class Kind : std::uint32_t { plain, windows, streams };
  explicit World(Kind kind);

  /// Makes the calls that an input says, and ends what is left of them.
  void play(std::string_view input);
  [[nodiscard]] const sluice_engine* engine() const noexcept { return engine_.get(); }
  /// Of all outputs and statuses since the beginning: two worlds with the same inputs have the same.
  [[nodiscard]] std::uint64_t seen() const noexcept { return seen_; }
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }

 private:
  struct Sequence {
    sluice_sequence id = 0;
    std::uint32_t policy = 0;
    std::vector<std::uint32_t> tokens;  ///< seeds of what their keys and values are
  };
  struct Tensors;

  // abi_world.cpp: calls that are right.
  void one(Bytes& bytes);
  void begin(Bytes& bytes);
  void import(Bytes& bytes, Sequence& of);
  void forward(Bytes& bytes);
  void fork(Bytes& bytes, const Sequence& of);
  void truncate(Bytes& bytes, Sequence& of);
  void park(Sequence& of);
  void name(Bytes& bytes, const Sequence& of);
  void look(Sequence& of);
  void end(std::size_t at);
  /// Whether it succeeded; a defect ends the process, as does a refusal without a text.
  bool call(sluice_status status);
  void require_tokens(const Sequence& of);
  std::uint32_t fresh() { return ++token_; }
  void note(const void* data, std::size_t size);
  void check_row(const Tensors& tensors, std::uint32_t row, std::uint32_t layer, std::span<const std::uint32_t> tokens,
                 bool prefill, std::uint32_t policy) const;

  // abi_wild.cpp: calls that are wrong, or may be.
  void wild(Bytes& bytes);
  void wild_forward(Bytes& bytes);
  void wild_options(Bytes& bytes);
  void wild_lists(Bytes& bytes);
  void wild_admission(Bytes& bytes);
  /// Refused, and nothing is written.
  void refused(sluice_status status);

  Kind kind_;
  std::unique_ptr<sluice_engine, DestroyEngine> engine_;
  std::vector<Sequence> sequences_;
  std::uint32_t token_ = 0;
  std::uint64_t seen_ = 0, calls_ = 0;
};

/// Of one layer.
struct World::Tensors {
  std::array<float, (kRows + kPromptRows) * kQHeads * kHeadDim> q{}, out{};
  std::array<float, (kRows + kPromptRows) * kKvHeads * kHeadDim> k{}, v{};
  std::array<float, (kRows + kPromptRows) * kQHeads> lse{};
};

[[nodiscard]] sluice_engine_options options_of(World::Kind kind);

/// A tensor of C with its sizes.
struct Tensor {
  std::array<std::int64_t, 3> shape{}, strides{};
  sluice_tensor tensor{};
  Tensor(float* data, std::uint32_t rows, std::uint32_t heads, std::uint32_t dim);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
};

}  // namespace sluice::test::abi
