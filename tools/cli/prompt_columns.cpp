#include "tools/cli/prompt_columns.hpp"

#include <algorithm>

namespace sluice::tools {
namespace {

double ms(std::uint64_t ns) { return static_cast<double>(ns) * 1e-6; }

/// Share of the link's time that nobody waited for; null without any.
Json hidden(std::uint64_t flush_ns, std::uint64_t wait_ns) {
  if (flush_ns == 0) return nullptr;
  return 1.0 - static_cast<double>(std::min(wait_ns, flush_ns)) / static_cast<double>(flush_ns);
}

}  // namespace

Table first_token_table(const PromptStats& stats, const FirstTokenTimes& times) {
  Table table{.key = "ttft",
              .title = "Where the time to the first token went. The rest is the model's products and what else lies "
                       "between. Indices are built beside the layers that follow; waiting for them is of the steps.",
              .layout = Table::Layout::pairs};
  std::vector<Json> row;
  const auto add = [&](const char* key, const char* title, Json value, Column::Show show = Column::Show::plain) {
    const bool nothing = value.is_number() && value.get<double>() < 0.05;  // It would read 0.0.
    table.columns.push_back({key, title, 1, show, nothing});
    row.push_back(std::move(value));
  };
  const std::uint64_t known = stats.attend_ns + stats.select_ns + stats.load_wait_ns + stats.flush_wait_ns;
  add("ttft_ms", "time to first token, ms", times.ttft_ms);
  add("prefill_ms", "prefill, ms", times.prefill_ms);
  add("attend_ms", "- attention, ms", ms(stats.attend_ns));
  add("select_ms", "- choice of blocks, ms", ms(stats.select_ns));
  add("load_wait_ms", "- waiting for keys from host memory, ms", ms(stats.load_wait_ns));
  add("flush_wait_ms", "- waiting for write-through, ms", ms(stats.flush_wait_ns));
  add("rest_ms", "- the rest, ms", std::max(0.0, times.prefill_ms - ms(known)));
  add("flush_ms", "write-through on the link, ms", ms(stats.flush_ns));
  add("flush_hidden_share", "of it hidden", hidden(stats.flush_ns, stats.flush_wait_ns), Column::Show::percent);
  add("tables_ms", "hash and score tables, ms", ms(stats.tables_ns));
  add("digests_ms", "page digests, ms", ms(stats.digests_ns));
  add("int4_ms", "4-bit copies, ms", ms(stats.int4_ns));
  add("clusters_ms", "clusters, ms", ms(stats.clusters_ns));
  add("index_wait_ms", "first step's wait for these four, ms", ms(stats.index_wait_ns));
  append_blocks(stats, table.columns, row);
  table.rows.push_back(std::move(row));
  return table;
}

void append_blocks(const PromptStats& stats, std::vector<Column>& columns, std::vector<Json>& row) {
  const auto share = [](std::uint64_t part, std::uint64_t whole, double none) {
    return whole == 0 ? none : static_cast<double>(part) / static_cast<double>(whole);
  };
  const bool chosen = stats.sparse_chunks != 0;
  columns.push_back({"blocks_share", "blocks computed", 1, Column::Show::percent, !chosen});
  row.push_back(share(stats.kept_blocks, stats.causal_blocks, 1.0));
  columns.push_back({"sparse_chunks_share", "chunks with a choice", 1, Column::Show::percent, !chosen});
  row.push_back(share(stats.sparse_chunks, stats.sparse_chunks + stats.dense_chunks, 0.0));
}

}  // namespace sluice::tools
