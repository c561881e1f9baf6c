#include "sluice/shape.hpp"

#include <string>

#include "cpu/machine/limits.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& field, const std::string& have, const std::string& want) {
  throw Error(Errc::invalid_argument, field + " is " + have + "; it must be " + want);
}

template <class T>
void require_range(const std::string& field, T value, T low, T high) {
  if (value < low || value > high) {
    refuse(field, std::to_string(value), "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
  }
}

}  // namespace

void validate(const AttentionShape& shape) {
  require_range<std::uint32_t>("shape.layers", shape.layers, 1, 1024);
  require_range<std::uint32_t>("shape.q_heads", shape.q_heads, 1, 1024);
  require_range<std::uint32_t>("shape.kv_heads", shape.kv_heads, 1, 1024);
  require_range<std::uint32_t>("shape.head_dim", shape.head_dim, 16, shape.latent() ? kMostLatentDim : kMostHeadDim);
  require_range<std::uint32_t>("shape.value_dim", shape.value_dim, 0, shape.head_dim);
  if (shape.latent() && shape.kv_heads != 1)
    refuse("shape.kv_heads", std::to_string(shape.kv_heads),
           "1 with shape.value_dim: all query heads of latent attention read one key");
  if (shape.q_heads % shape.kv_heads != 0) {
    refuse("shape.q_heads", std::to_string(shape.q_heads),
           "a multiple of shape.kv_heads (" + std::to_string(shape.kv_heads) + ")");
  }
  if (!shape.latent() && shape.group() > kMostGroup) {
    refuse("shape.q_heads / shape.kv_heads", std::to_string(shape.group()), "at most 32: group members are bits");
  }
  if (shape.head_dim % 16 != 0) refuse("shape.head_dim", std::to_string(shape.head_dim), "a multiple of 16");
  if (shape.value_dim % 16 != 0) refuse("shape.value_dim", std::to_string(shape.value_dim), "a multiple of 16");
}

std::uint64_t available_host_bytes() { return cpu::available_memory_bytes(); }

}  // namespace sluice
