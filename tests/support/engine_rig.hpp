#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

namespace sluice::test {

/// A device, and a stream of it on which forwards run.
struct EngineRig {
  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> queue;
  void* stream = nullptr;  ///< as Engine wants it
  DType kv_dtype = DType::f32;
  /// Of outputs whose keys are attended in other parts, or at another time: a GPU's products are not exact.
  double tolerance = 1e-5;
  std::vector<DType> kv_dtypes = {DType::f32, DType::f16, DType::bf16};

  void synchronize() const { queue->synchronize(deadline_after(std::chrono::seconds(60))); }
};
/// What the cases run on; each test executable has its own.
[[nodiscard]] EngineRig engine_rig();

/// Bytes of host memory that a block of such an engine takes.
[[nodiscard]] inline std::uint64_t block_bytes(const EngineOptions& options) {
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  return layout.page_bytes() * options.shape.layers * options.shape.kv_heads;
}

/// The code of the Error that a call ends with, whose text must say something.
template <class Call>
[[nodiscard]] Errc code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(std::string(error.what()).size() > 20);
    return error.code();
  }
  FAIL("no error");
  return {};
}

/// The largest difference; infinity where one of them is not a number.
[[nodiscard]] double difference(std::span<const float> a, std::span<const float> b);

/// Queries, keys and values of one sequence, the latter two on a grid that every dtype holds exactly, with a few keys
/// that stand out.
class Story {
 public:
  Story(const AttentionShape& shape, std::uint32_t tokens, std::uint64_t seed);

  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] const float* q(std::uint32_t layer, std::uint32_t token) const;  ///< [q_heads, head_dim]
  [[nodiscard]] const float* k(std::uint32_t layer, std::uint32_t token) const;  ///< [kv_heads, head_dim]
  [[nodiscard]] const float* v(std::uint32_t layer, std::uint32_t token) const;

  /// The key of a token is not a number from now on.
  void poison(std::uint32_t layer, std::uint32_t token);

  /// All tokens of a layer have the first one's queries from now on.
  void repeat_query();

  /// Every token has the key of the token `period` before it from now on: scores tie.
  void repeat_keys(std::uint32_t period);

  /// In tokens whose number is odd, every query asks for the first four tokens more than for anything, from now on.
  void lean_on_sinks();

  /// Tokens before `first` are those of another story of this shape from now on.
  void begin_as(const Story& other, std::uint32_t first);

  /// Queries are numbers of bf16 from now on.
  void round_queries();

  /// What a policy of sinks, recent tokens and `picks` per query head attends at `token`, in float64: [q_heads,
  /// head_dim]. Estimates are those of the 4-bit copies; a group attends what any of its heads chose. `lse`, unless
  /// null, receives the natural logs of the sums of exponentials.
  [[nodiscard]] std::vector<double> attended(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                             std::uint32_t recent, std::uint32_t picks,
                                             std::vector<double>* lse = nullptr) const;
  /// The same of a policy whose query heads each choose the fewest tokens that hold `mass`, with sinks and recent
  /// tokens, by the estimates of all visible tokens.
  [[nodiscard]] std::vector<double> attended_by_mass(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                                     std::uint32_t recent, double mass) const;

  /// A policy whose query heads each choose the best pages by digest, and of their tokens the fewest that hold `mass`
  /// with what is attended anyway, the newest page among it.
  struct InPages {
    std::uint32_t page_tokens = 16;
    DigestKind digest = DigestKind::box;
    std::uint32_t pages = 0;
    std::uint32_t sinks = 0;
    std::uint32_t recent = 1;
    double mass = 1.0;
  };
  [[nodiscard]] std::vector<double> attended_in_pages(std::uint32_t layer, std::uint32_t token,
                                                      const InPages& policy) const;

 private:
  /// The score of a page's digest, in float64.
  [[nodiscard]] double page_score(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t page,
                                  const InPages& policy) const;
  /// Estimates of tokens [begin, end), largest first.
  using Ranked = std::vector<std::pair<double, std::uint32_t>>;
  [[nodiscard]] Ranked ranked(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t begin,
                              std::uint32_t end) const;
  /// `choose(head, sink_end, recent_begin, marks)` sets the marks of what a query head chooses.
  template <class Choose>
  [[nodiscard]] std::vector<double> attended_as(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                                std::uint32_t recent, const Choose& choose,
                                                std::vector<double>* lse) const;

  AttentionShape shape_;
  std::uint32_t tokens_;
  std::vector<float> q_, k_, v_;  ///< [layers, tokens, heads, head_dim]
};

/// Tensors of a forward, in memory that device and host see.
class ForwardTensors {
 public:
  ForwardTensors(Device& device, const AttentionShape& shape, std::uint32_t rows);
  /// Those of a forward of a smaller bucket: the first rows of each layer's tensors.
  void attend(Engine& engine, const Bucket& bucket, void* stream);

  /// Row `row` of the forward is `story`'s token.
  void set(std::uint32_t row, const Story& story, std::uint32_t token);
  /// Enqueues all layers of the largest bucket.
  void attend(Engine& engine, void* stream) { attend(engine, engine.options().largest, stream); }
  /// Enqueues one.
  void attend_layer(Engine& engine, const Bucket& bucket, std::uint32_t layer, void* stream);
  /// Outputs of a row, all layers: [layers, q_heads, head_dim].
  [[nodiscard]] std::vector<float> out(std::uint32_t row) const;
  [[nodiscard]] std::vector<float> lse(std::uint32_t row) const;  ///< likewise: [layers, q_heads]
  /// So that an output that nobody wrote shows.
  void spoil();

 private:
  struct Parts {
    float *q, *k, *v, *out, *lse;
  };
  [[nodiscard]] Parts parts(std::uint32_t layer) const;

  AttentionShape shape_;
  std::uint32_t rows_;
  std::uint64_t q_floats_, kv_floats_, lse_floats_;  ///< of one layer
  std::unique_ptr<Buffer> buffer_;
};

/// One sequence of a test: its story, and where it is.
struct Teller {
  const Story* story = nullptr;
  SequenceId id;
  std::uint32_t at = 0;
};

/// Brings the story's first tokens in, at most `rows` at a time, with the queries of those from `first_query` on.
void import_story(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens,
                  std::uint32_t rows = kNone, std::uint32_t first_query = kNone);

/// A plan of one new token for each of these.
[[nodiscard]] std::vector<PlanItem> one_each(std::span<const SequenceId> ids);

/// Plans a forward of the largest bucket for these, enqueues it, finishes it; the outputs of each.
std::vector<std::vector<float>> run_forward(Engine& engine, const EngineRig& rig, ForwardTensors& tensors,
                                            std::vector<Teller*> tellers);

}  // namespace sluice::test
