#include "cpu/stages/score_tokens.hpp"

#include <algorithm>

#include "cpu/stages/code_rows.hpp"
#include "cpu/stages/row_list.hpp"
#include "cpu/stages/rows.hpp"

namespace sluice::cpu {

void score_tokens(const Kernels& kernels, const ScoreTokensTask& task, const AttentionShape& shape) noexcept {
  constexpr std::size_t kMost = 1024;
  const std::byte* rows[kMost];
  const float* scales[kMost];
  for (std::size_t begin = 0; begin < task.tokens.size(); begin += kMost) {
    const auto some = task.tokens.subspan(begin, std::min(kMost, task.tokens.size() - begin));
    list_rows(task.kv, some, rows);
    if (task.kv.layout.scaled()) list_scales(task.kv, some, scales);
    kernels_for(kernels, task.kv.layout.dtype)
        .score({.q = task.q,
                .scale = shape.score_scale(),
                .softcap = shape.softcap,
                .k = rows,
                .scales = scales,
                .count = static_cast<std::uint32_t>(some.size()),
                .group = shape.group(),
                .head_dim = shape.head_dim,
                .out = task.out + begin * shape.group()});
  }
}

void estimate_tokens(const Kernels& kernels, const EstimateTokensTask& task, const AttentionShape& shape,
                     const PageLayout& layout) noexcept {
  const CodeLayout copy(layout);
  const std::uint32_t group = shape.group();
  CodeRows rows(copy);
  for (std::size_t begin = 0; begin < task.tokens.size(); begin += CodeRows::kMost) {
    const auto some = task.tokens.subspan(begin, std::min<std::size_t>(CodeRows::kMost, task.tokens.size() - begin));
    for (const std::uint32_t token : some)
      rows.add(task.copies + task.frames[token / copy.page_tokens] * copy.page_bytes(), token % copy.page_tokens);
    rows.flush(kernels, task.q, task.mean, shape.score_scale(), group, task.out + begin * group, group, 1);
  }
  for (std::size_t i = 0; i < task.tokens.size() * group && shape.softcap != 0.f; ++i)
    task.out[i] = shape.capped(task.out[i]);
}

}  // namespace sluice::cpu
