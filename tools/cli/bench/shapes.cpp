#include "tools/cli/bench/shapes.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

struct NamedShape {
  std::string_view name;
  AttentionShape shape;
  // Of the model.
  std::uint32_t layers;
  std::uint32_t hidden;
  std::uint32_t intermediate;
  std::uint32_t vocabulary;
};
constexpr std::array<NamedShape, 4> kShapes{{
    {"llama-3.1-8b", {.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128}, 32, 4096, 14336, 128256},
    {"llama-3.1-70b", {.layers = 1, .q_heads = 64, .kv_heads = 8, .head_dim = 128}, 80, 8192, 28672, 128256},
    {"llama-3.2-1b", {.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 64}, 16, 2048, 8192, 128256},
    {"testbed", {.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64}, 8, 384, 1024, 320},
}};

const NamedShape& named(const std::string& name) {
  const auto* const found = std::ranges::find(kShapes, name, &NamedShape::name);
  if (found == kShapes.end())
    throw Error(Errc::invalid_argument, "--shape: unknown shape '" + name + "'; have " + shape_names());
  return *found;
}

}  // namespace

std::string shape_names() {
  std::string names;
  for (const NamedShape& named : kShapes) names += (names.empty() ? "" : ", ") + std::string(named.name);
  return names;
}

void add_shape_flags(CLI::App& app, AttentionShape& shape) {
  constexpr CountRange kAny{.least = 1, .most = 65'536};
  add_count(app, "--q-heads", shape.q_heads, "Query heads [default: the shape's]", kAny)->default_str("");
  add_count(app, "--kv-heads", shape.kv_heads, "KV heads [default: the shape's]", kAny)->default_str("");
  add_count(app, "--head-dim", shape.head_dim, "Elements per head [default: the shape's]", kAny)->default_str("");
}

AttentionShape named_shape(const std::string& name) { return named(name).shape; }

AttentionShape named_shape(const std::string& name, const AttentionShape& flags) {
  AttentionShape shape = named_shape(name);
  if (flags.q_heads != 0) shape.q_heads = flags.q_heads;
  if (flags.kv_heads != 0) shape.kv_heads = flags.kv_heads;
  if (flags.head_dim != 0) shape.head_dim = flags.head_dim;
  validate(shape);
  return shape;
}

AttentionShape model_shape(const std::string& name) {
  AttentionShape shape = named(name).shape;
  shape.layers = named(name).layers;
  return shape;
}

std::uint64_t weights_read(const std::string& name, std::uint32_t layers) {
  constexpr std::uint64_t kBytes = 2;
  const NamedShape& model = named(name);
  const AttentionShape& shape = model.shape;
  // Queries and outputs, keys and values; then gate, up and down.
  const std::uint64_t attention = std::uint64_t{2} * (shape.q_heads + shape.kv_heads) * shape.head_dim;
  const std::uint64_t layer = model.hidden * (attention + std::uint64_t{3} * model.intermediate);
  return kBytes * (layers * layer + std::uint64_t{model.hidden} * model.vocabulary);
}

}  // namespace sluice::tools
