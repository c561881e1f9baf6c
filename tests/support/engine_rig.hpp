#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/story.hpp"

namespace sluice::tools {
class Stages;
}

namespace sluice::test {

/// A device, and a stream of it on which forwards run.
struct EngineRig {
  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> queue;
  std::shared_ptr<tools::Stages> stages{};  ///< stages one by one: at once, or on `queue`
  void* stream = nullptr;  ///< as Engine wants it
  DType kv_dtype = DType::f32;
  bool on_gpu = false;
  /// Of outputs whose keys are attended in other parts, or at another time: a GPU's products are not exact.
  double tolerance = 1e-5;
  std::vector<DType> kv_dtypes = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};

  void synchronize() const { queue->synchronize(deadline_after(std::chrono::seconds(60))); }
};
/// What the cases run on; each test executable has its own.
[[nodiscard]] EngineRig engine_rig();
/// The type that the environment variable SLUICE_TEST_KV_DTYPE names, for the cases once more with far rows of it.
[[nodiscard]] DType kv_dtype_or(DType usual);
/// Likewise what SLUICE_TEST_HANDOVER names, for the cases once more where something else waits for the CPU.
[[nodiscard]] Handover handover_or(Handover usual);

/// Bytes of host memory that a block of such an engine takes.
[[nodiscard]] inline std::uint64_t block_bytes(const EngineOptions& options) {
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  return layout.page_bytes() * options.shape.layers * options.shape.kv_heads;
}

/// And of device memory, as near pages.
[[nodiscard]] inline std::uint64_t near_block_bytes(const EngineOptions& options) {
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.kv_dtype};
  return layout.near().page_bytes() * options.shape.layers * options.shape.kv_heads;
}

/// The Error that a call ends with, whose text must say something.
struct Refusal {
  Errc code{};
  std::string text;
};
template <class Call>
[[nodiscard]] Refusal refusal_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(std::string(error.what()).size() > 20);
    return {.code = error.code(), .text = error.what()};
  }
  FAIL("no error");
  return {};
}
template <class Call>
[[nodiscard]] Errc code_of(const Call& call) {
  return refusal_of(call).code;
}

/// The largest difference; infinity where one of a pair is not a number, or there are not as many of both.
[[nodiscard]] double difference(std::span<const float> a, std::span<const float> b);
[[nodiscard]] double difference(std::span<const float> a, std::span<const double> b);

/// Tensors of a forward, in memory that device and host see.
class ForwardTensors {
 public:
  ForwardTensors(Device& device, const AttentionShape& shape, std::uint32_t rows);
  /// Those of a forward of a smaller bucket: the first rows of each layer's tensors.
  void attend(Engine& engine, const Bucket& bucket, void* stream);

  /// Row `row` of the forward is `story`'s token.
  void set(std::uint32_t row, const Story& story, std::uint32_t token);
  /// From now on each layer comes with such scores: [layers], in memory that outlives its forwards.
  void bring(std::vector<TensorView> scores) { scores_ = std::move(scores); }
  /// Enqueues all layers of the largest bucket.
  void attend(Engine& engine, void* stream) { attend(engine, engine.options().largest, stream); }
  /// Enqueues one. If the bucket has rehearsed queries, they are those of the layer before.
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
  std::vector<TensorView> scores_;
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

/// Plans a forward of rows that are set, enqueues all of it, finishes it, and waits until its outputs are there.
Batch run_batch(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, std::span<const PlanItem> items,
                const Bucket& bucket);

/// Runs a forward of the largest bucket with the next token of each of these; the outputs of each.
std::vector<std::vector<float>> run_forward(Engine& engine, const EngineRig& rig, ForwardTensors& tensors,
                                            std::vector<Teller*> tellers);

}  // namespace sluice::test
