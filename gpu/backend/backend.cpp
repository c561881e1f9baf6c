#include "gpu/backend/backend.hpp"

#include "gpu/backend/verbs.hpp"

namespace sluice::gpu {

std::vector<std::string> Backend::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return gpu::unsupported_reasons(shape, layout);
}

}  // namespace sluice::gpu
