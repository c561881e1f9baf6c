#include "tools/cli/engine_flags.hpp"

#include <algorithm>
#include <compare>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/page_rules.hpp"
#include "tools/cli/dense_flag.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_handover(CLI::App& app, Handover& handover) {
  const auto read = [&handover](const std::string& text) { handover = parse_handover(text); };
  app.add_option_function<std::string>(
         "--handover", read,
         "Who waits for the CPU's part of a layer: a kernel of the device, its stream, or the calling thread, without "
         "graphs; auto: as suits the device")
      ->type_name("auto|device|stream|host")
      ->default_str(to_string(handover));
}

void add_graphs(CLI::App& app, Graphs& graphs) {
  const auto read = [&graphs](const std::string& text) { graphs = parse_graphs(text, "--graphs"); };
  app.add_option_function<std::string>(
         "--graphs", read,
         "Whether a forward that decodes is one CUDA graph, from its products to the choice of the token: auto where "
         "that works; not on the CPU, with --handover host, or while it is audited or traced")
      ->type_name("auto|on|off")
      ->default_str(to_string(graphs));
}

void add_engine_flags(CLI::App& app, EngineFlags& flags, const std::string& dense) {
  const auto read_placement = [&flags](const std::string& text) { flags.placement = parse_placement(text); };
  app.add_option_function<std::string>(
         "--placement", read_placement,
         "Who attends what is chosen and not near: the CPU in place, or the device over the link")
      ->type_name("hybrid|stream")
      ->default_str(to_string(flags.placement));
  add_fetch_share(app, flags.fetch_share);
  add_handover(app, flags.handover);
  add_size(app, "--host-size", flags.host_bytes,
           "Host memory for the KV cache, K/M/G allowed [default: sized to the prompt]");
  add_size(app, "--near-size", flags.near_bytes,
           "Device memory for near tokens, K/M/G allowed [default: what --near says]");
  const std::function<void(std::uint64_t)> set_page_tokens = [&flags](std::uint64_t tokens) {
    flags.page_tokens = static_cast<std::uint32_t>(tokens);
    flags.own_pages = false;
  };
  add_count(app, "--page-tokens", set_page_tokens,
            "Tokens per page; a power of two in [8, 256] [default: what the policy was made for, else 16]");
  const auto read_kv_dtype = [&flags](const std::string& text) {
    flags.own_kv_dtype = text == "auto";
    if (!flags.own_kv_dtype) flags.kv_dtype = parse_kv_dtype(text, "--kv-dtype");
  };
  app.add_option_function<std::string>(
         "--kv-dtype", read_kv_dtype,
         "Element type of keys and values in the cache; auto: the checkpoint's, bf16 on a GPU; fp8_e4m3: half the host "
         "memory, with a scale for each row, and bf16 near")
      ->type_name("auto|f32|f16|bf16|fp8_e4m3")
      ->default_str("auto");
  add_dense_tokens(app, flags.dense_tokens, dense);
  add_count(app, "--threads", flags.threads, "Threads of host work; 0: one per core that this process may use",
            {.most = 4096});
  const std::function<void(const std::string&)> set_cores = [&flags](const std::string& text) {
    flags.cores = parse_ranges(text, "--cores");
  };
  app.add_option_function<std::string>(
         "--cores", set_cores,
         "Cores of host work, by their PUs, such as 0-7,16 [default: all, or this process' part under torchrun]")
      ->type_name("LIST");
  const std::function<void(std::uint64_t)> set_chunk = [&flags](std::uint64_t tokens) {
    flags.prefill_chunk = static_cast<std::uint32_t>(tokens);
    flags.own_chunk = false;
  };
  add_count(app, "--prefill-chunk", set_chunk,
            "Prompt tokens per prefill call [default: 8192 on a GPU, else 512, or 4096 where blocks of the prompt are "
            "chosen]",
            {.least = 1, .most = 65'536});
  const std::function<void(double)> set_timeout = [&flags](double seconds) {
    flags.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
  };
  add_number(app, "--timeout", set_timeout, "Seconds after which a wait gives up", {.least = 0.001, .most = 3600.0})
      ->type_name("SECONDS")
      ->default_str(std::to_string(flags.timeout.count() / 1000));
}

void choose_kv_dtype(EngineFlags& flags, const Model& model) noexcept {
  if (flags.own_kv_dtype) flags.kv_dtype = model.kv_dtype();
}

std::uint32_t page_tokens_for(const PolicySpec& policy, const EngineFlags& flags) noexcept {
  return flags.own_pages && policy.page_tokens != 0 ? policy.page_tokens : flags.page_tokens;
}

namespace {

/// What an engine has one of, of what a policy reads; none: it reads none.
struct EngineKind {
  std::uint32_t page_tokens = 0;
  std::uint32_t code_bits = 0;
  std::optional<DigestKind> digests;

  [[nodiscard]] bool suits(const EngineKind& other) const noexcept {
    return page_tokens == other.page_tokens &&
           (code_bits == other.code_bits || code_bits == 0 || other.code_bits == 0) &&
           (digests == other.digests || !digests || !other.digests);
  }
  friend auto operator<=>(const EngineKind&, const EngineKind&) = default;
};

EngineKind kind_of(const PolicySpec& policy, const EngineFlags& flags) {
  return {.page_tokens = page_tokens_for(policy, flags),
          .code_bits = scheduler::code_bits(policy),
          .digests = policy.uses(Source::pages) ? std::optional(policy.pages.digest) : std::nullopt};
}

}  // namespace

std::vector<EngineGroup> by_engine(std::span<const PolicySpec> policies, const EngineFlags& flags) {
  std::map<EngineKind, std::vector<std::size_t>> groups;
  for (std::size_t p = 0; p < policies.size(); ++p) groups[kind_of(policies[p], flags)].push_back(p);
  std::vector<EngineGroup> found;
  for (auto& [kind, members] : groups) {
    // Who needs no digests, or no copies, goes with those that do.
    const bool joins = !found.empty() && std::ranges::all_of(found.back().policies, [&](std::size_t p) {
      return kind_of(policies[p], flags).suits(kind);
    });
    if (joins) {
      found.back().policies.insert(found.back().policies.end(), members.begin(), members.end());
    } else {
      found.push_back({.page_tokens = kind.page_tokens, .policies = std::move(members)});
    }
  }
  return found;
}

void refuse_scores(const PolicySpec& policy) {
  if (!scheduler::brings_scores(policy)) return;
  throw Error(Errc::unsupported, "policy " + policy.name +
                                     " chooses by scores of a model's own indexer, which no model of this command has; "
                                     "choose by copies of keys, as in exact | int4 | sample=256");
}

EngineOptions sized(const EngineFlags& flags, const AttentionShape& shape, std::span<const PolicySpec> policies,
                    const EngineRoom& room) {
  EngineOptions options;
  options.shape = shape;
  options.page_tokens = room.page_tokens;
  options.kv_dtype = flags.kv_dtype;
  const PageLayout layout{.page_tokens = room.page_tokens, .head_dim = shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t planes = std::uint64_t{shape.layers} * shape.kv_heads;
  const std::uint64_t block = layout.page_bytes() * planes;
  const std::uint64_t longest = div_up(room.tokens, room.page_tokens);
  constexpr std::uint64_t kOpenPages = 2;  // The one that a fork copies, and where its own begin.
  const std::uint64_t blocks = longest + (room.apart == 0 ? 0 : div_up(room.apart, room.page_tokens) + kOpenPages);
  options.host_bytes = flags.host_bytes != 0 ? flags.host_bytes : blocks * block;
  if (options.host_bytes < blocks * block)
    throw Error(Errc::out_of_capacity, "--host-size " + format_size(options.host_bytes) + " cannot hold " +
                                           std::to_string(room.tokens) + " tokens (prompt and answer); they take " +
                                           std::to_string(blocks * block) +
                                           " bytes. Raise --host-size or shorten the prompt");
  options.near_bytes = flags.near_bytes != 0 ? flags.near_bytes
                                             : static_cast<std::uint64_t>(room.near * static_cast<double>(longest)) *
                                                   layout.near().page_bytes() * planes;
  options.placement = flags.placement;
  options.fetch_share = flags.fetch_share;
  options.dense_tokens = flags.dense_tokens.value_or(options.dense_tokens);
  options.handover = flags.handover;
  options.largest = {.decode_rows = 1,
                     .prefill_rows = std::min(flags.prefill_chunk, room.tokens),
                     .prefills = 1,
                     .max_tokens = static_cast<std::uint32_t>(longest) * room.page_tokens,
                     .top_k = false,
                     .audit = flags.audit_every != 0};
  options.sequences = room.apart == 0 ? 1 : 2;
  for (const PolicySpec& policy : policies) refuse_scores(policy);
  options.policies.assign(policies.begin(), policies.end());
  options.prefill = room.prefill;
  options.import_rows = std::min(options.import_rows, room.tokens);
  options.threads = flags.threads;
  options.cores = flags.cores;
  options.timeout = flags.timeout;
  return resolved(options);
}

Json to_json(const EngineOptions& options) {
  return {{"layers", options.shape.layers},
          {"q_heads", options.shape.q_heads},
          {"kv_heads", options.shape.kv_heads},
          {"head_dim", options.shape.head_dim},
          {"page_tokens", options.page_tokens},
          {"kv_dtype", to_string(options.kv_dtype)},
          {"host_bytes", options.host_bytes},
          {"near_bytes", options.near_bytes},
          {"placement", to_string(options.placement)},
          {"fetch_share", fetch_share_json(options.fetch_share)},
          {"dense_tokens", dense_tokens_json(options.dense_tokens)},
          {"handover", to_string(options.handover)},
          {"threads", options.threads},
          {"timeout_ms", options.timeout.count()}};
}

}  // namespace sluice::tools
