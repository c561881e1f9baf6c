#include "tools/cli/runtime_flags.hpp"

#include <algorithm>
#include <cmath>

#include "tools/cli/values.hpp"

namespace sluice::tools {
namespace {

/// Pages of one (layer, KV head) that a policy wants near: what must be, its share by LRU, and room for fetches.
std::uint64_t near_pages(const PolicySpec& policy, const RuntimeOptions& options, std::uint64_t pages) {
  if (options.placement == PlacementMode::near) return pages;
  constexpr std::uint64_t kOpenAndCutPages = 3;  // The open page, and one cut by each end of the recent window.
  const std::uint64_t must = div_up(policy.near.sink_tokens, options.page_tokens) +
                             div_up(policy.near.recent_tokens, options.page_tokens) + kOpenAndCutPages;
  const auto share = static_cast<std::uint64_t>(std::ceil(double{policy.near.share} * static_cast<double>(pages)));
  return std::min(pages, must + share) + options.promote_pages;
}

}  // namespace

void add_runtime_flags(CLI::App& app, RuntimeFlags& flags) {
  RuntimeOptions& o = flags.options;
  const auto read_placement = [&o](const std::string& text) { o.placement = parse_placement(text); };
  app.add_option_function<std::string>("--placement", read_placement, "Who attends what is selected but not near")
      ->type_name("hybrid|stream|near|auto")
      ->default_str(to_string(o.placement));
  add_size(app, "--host-size", o.host_bytes,
           "Host memory for the KV cache, K/M/G allowed [default: sized to the prompt]");
  add_size(app, "--near-size", o.near_bytes,
           "Near memory for KV pages, K/M/G allowed [default: what the policy wants]");
  const std::function<void(std::uint64_t)> set_page_tokens = [&flags](std::uint64_t tokens) {
    flags.options.page_tokens = static_cast<std::uint32_t>(tokens);
    flags.own_pages = false;
  };
  add_count(app, "--page-tokens", set_page_tokens,
            "Tokens per page; a power of two in [8, 256] [default: what the policy was made for, else 16]");
  const auto read_kv_dtype = [&flags](const std::string& text) {
    flags.own_kv_dtype = text == "auto";
    if (!flags.own_kv_dtype) flags.options.kv_dtype = parse_dtype(text, "--kv-dtype");
  };
  app.add_option_function<std::string>(
         "--kv-dtype", read_kv_dtype,
         "Element type of keys and values in the cache; auto: the checkpoint's, bf16 on a GPU")
      ->type_name("auto|f32|f16|bf16")
      ->default_str("auto");
  add_count(app, "--threads", o.threads, "Threads of host work; 0: one per core that this process may use",
            {.most = 4096});
  const std::function<void(const std::string&)> set_cores = [&o](const std::string& text) {
    o.cores = parse_ranges(text, "--cores");
  };
  app.add_option_function<std::string>(
         "--cores", set_cores,
         "Cores of host work, by their PUs, such as 0-7,16 [default: all, or this process' part under torchrun]")
      ->type_name("LIST");
  const std::function<void(std::uint64_t)> set_chunk = [&flags](std::uint64_t tokens) {
    flags.options.prefill_chunk = static_cast<std::uint32_t>(tokens);
    flags.own_chunk = false;
  };
  add_count(app, "--prefill-chunk", set_chunk,
            "Prompt tokens per prefill call [default: 8192 on a GPU, else 512, or 4096 where blocks of the prompt are "
            "chosen]");
  add_count(app, "--promote-pages", o.promote_pages, "Pages that a forecast may promote per layer and step");
  const std::function<void(double)> set_timeout = [&o](double seconds) {
    o.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
  };
  add_number(app, "--timeout", set_timeout, "Seconds after which a wait gives up", {.least = 0.001, .most = 3600.0})
      ->type_name("SECONDS")
      ->default_str(std::to_string(o.timeout.count() / 1000));
}

void choose_kv_dtype(RuntimeFlags& flags, const Model& model) noexcept {
  if (flags.own_kv_dtype) flags.options.kv_dtype = model.kv_dtype();
}

std::uint32_t page_tokens_for(const PolicySpec& policy, const RuntimeFlags& flags) noexcept {
  return flags.own_pages && policy.page_tokens != 0 ? policy.page_tokens : flags.options.page_tokens;
}

std::map<std::uint32_t, std::vector<std::size_t>> by_page_size(std::span<const PolicySpec> policies,
                                                               const RuntimeFlags& flags) {
  std::map<std::uint32_t, std::vector<std::size_t>> groups;
  for (std::size_t p = 0; p < policies.size(); ++p) groups[page_tokens_for(policies[p], flags)].push_back(p);
  return groups;
}

RuntimeOptions sized(const RuntimeFlags& flags, const AttentionShape& shape, std::span<const PolicySpec> policies,
                     std::uint32_t tokens) {
  RuntimeOptions options = flags.options;
  options.shape = shape;
  // Reject nonsense before it is multiplied into sizes.
  RuntimeOptions probe = options;
  if (probe.host_bytes == 0) probe.host_bytes = RuntimeOptions{}.host_bytes;
  validate(probe);
  const std::uint64_t heads = std::uint64_t{shape.layers} * shape.kv_heads;
  const std::uint64_t pages = div_up(tokens, options.page_tokens);
  const std::uint64_t needed = heads * pages * options.layout().page_bytes();
  if (options.host_bytes == 0) options.host_bytes = needed;
  if (options.host_bytes < needed) {
    throw Error(Errc::out_of_capacity, "--host-size " + format_size(options.host_bytes) + " cannot hold " +
                                           std::to_string(tokens) + " tokens (prompt and answer); they take " +
                                           std::to_string(needed) + " bytes. Raise --host-size or shorten the prompt");
  }
  if (options.near_bytes == 0) {
    std::uint64_t wanted = 0;
    for (const PolicySpec& policy : policies) wanted = std::max(wanted, near_pages(policy, options, pages));
    options.near_bytes = heads * wanted * options.layout().page_bytes();
  }
  return options;
}

Json to_json(const RuntimeOptions& options) {
  return {{"layers", options.shape.layers},
          {"q_heads", options.shape.q_heads},
          {"kv_heads", options.shape.kv_heads},
          {"head_dim", options.shape.head_dim},
          {"page_tokens", options.page_tokens},
          {"kv_dtype", to_string(options.kv_dtype)},
          {"host_bytes", options.host_bytes},
          {"near_bytes", options.near_bytes},
          {"placement", to_string(options.placement)},
          {"promote_pages", options.promote_pages},
          {"prefill_chunk", options.prefill_chunk},
          {"threads", options.threads},
          {"timeout_ms", options.timeout.count()},
          {"audit_every", options.audit_every}};
}

}  // namespace sluice::tools
