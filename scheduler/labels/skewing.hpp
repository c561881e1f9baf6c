#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice::scheduler {

/// An orthogonal matrix that turns the coordinates of a head's queries and keys so that a few of them say most about
/// q.k, which stays as it is (InfiniGen, section 4.2): the right singular vectors of the queries, the largest singular
/// value first. Row c of [head_dim, head_dim] is what coordinate c is the product with. Rows of queries that are not
/// finite do not count; without any that do it is some orthogonal matrix. In float64.
[[nodiscard]] std::vector<double> skewing_matrix(std::span<const float> queries, std::uint32_t head_dim);

}  // namespace sluice::scheduler
