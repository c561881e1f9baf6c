#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "sluice/bucket.hpp"
#include "sluice/device.hpp"
#include "sluice/engine_stats.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// Where chosen rows that are not near are attended.
enum class PlacementMode : std::uint8_t {
  hybrid,  ///< the CPU, in place, while the device attends what is near
  stream,  ///< the device, over the link
};

[[nodiscard]] constexpr bool is_valid(PlacementMode mode) noexcept { return mode <= PlacementMode::stream; }

[[nodiscard]] constexpr const char* to_string(PlacementMode mode) noexcept {
  return mode == PlacementMode::hybrid ? "hybrid" : mode == PlacementMode::stream ? "stream" : "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists the modes.
[[nodiscard]] PlacementMode parse_placement(std::string_view text);

/// Host memory that this process can still take before the kernel reclaims or kills, its control groups' limits
/// included. Read anew at every call; the largest number if nothing limits it.
[[nodiscard]] std::uint64_t available_host_bytes();

/// EngineOptions::dense_tokens: what an engine finds best.
inline constexpr std::uint32_t kDenseAuto = kNone;
/// EngineOptions::fetch_share: what the device's link and the threads advise.
inline constexpr float kFetchAuto = -1.f;

/// EngineOptions::cpu_sequences and ::cluster_sequences: as many as live at once.
inline constexpr std::uint32_t kAllSequences = kNone;

/// `sluice`: what an engine is for unless it is told otherwise. Not `full`, whose lists of all tokens take memory, and
/// a bucket without it chooses faster.
[[nodiscard]] std::vector<PolicySpec> default_policies();

/// Everything that is fixed when an Engine is built.
struct EngineOptions {
  /// Required; its scale and softcap are 0, those below count. With a value_dim, on the CPU alone: everything lies in
  /// host memory, without fp8, windows, drafts, audits, traces or choices of blocks of prompts; policies attend
  /// everything, or choose among all tokens by copies of keys or by scores of the caller; sequences cannot be parked.
  AttentionShape shape;
  /// What q.k is multiplied by, above 0; 0: 1 / sqrt(head_dim).
  float scale = 0.f;
  /// Above 0, at most 1000: a scaled logit x becomes softcap * tanh(x / softcap), as in Gemma 2. 0: it stays as it is.
  /// Not beside prompts whose blocks are chosen, see `prefill`.
  float softcap = 0.f;
  /// Of each layer the newest tokens that a row of it sees, its own included; 0: all. Empty: so in all layers; else one
  /// per layer. With a window a row attends all that it sees, and its sequence's policy chooses nothing there and
  /// learns nothing there; and prompts attend densely.
  std::vector<std::uint32_t> windows{};
  /// Of layers with windows a sequence keeps the tokens that its next one sees, and as many before these, so that it
  /// can be forked or truncated by as many; what lies behind is free again. With windows [largest.drafts - 1, 2^24]
  std::uint32_t window_slack = 64;
  std::uint32_t page_tokens = 16;  ///< power of two in [8, 256]
  /// Of keys and values in memory. fp8_e4m3: rows of host memory are rounded to 8 bits with a scale each, see E4m3, and
  /// lie near as bf16, with the same values. f32: of the embedded host device.
  DType kv_dtype = DType::bf16;
  /// For keys and values; a block, one page of tokens of all layers and KV heads, at least.
  std::uint64_t host_bytes = 1 * GiB;
  /// Device memory for near pages, as many of each layer and KV head; what is left of one of all of them is not used.
  /// They are a cache of far ones, row by row: tokens come in near, those that are not attended give way, and those
  /// that are attended far again and again are brought. If this is not 0, it takes 4 bytes of device memory more for
  /// each token, layer and KV head that host_bytes hold. What copies of keys, digests and buffers leave of a budget of
  /// device memory: near_bytes_within().
  std::uint64_t near_bytes = 0;
  /// Tokens of a layer and KV head that are brought near at a time, at most, in every kNearTurn-th forward, beside the
  /// one that follows it; where there is near memory each takes 12 bytes of device memory. With 512K tokens an H200
  /// took 482, 352 and 307 us a layer with 256, 512 and 1,024 of them. [0, 1024]
  std::uint32_t promotions = 1024;
  /// What attends chosen rows that are not near. hybrid: the CPU, in place, while the device attends the rest; stream:
  /// the device, over the link. Then it asks the CPU for nothing but the choices of policies that choose there, and
  /// each row that chooses takes 8 bytes of pinned memory for each KV head and token that a sequence may have, if
  /// there are such policies.
  PlacementMode placement = PlacementMode::hybrid;
  /// Of a list of far rows that the device chose, the share that it attends over the link in `hybrid`, too, while the
  /// CPU attends the others in place. Both are done at once where it is link / (link + CPU), of the rates at which they
  /// read scattered rows. [0, 1], counted in 256ths; lists are cut at whole units of 16 rows, and those of less than 64
  /// not at all. Rows are the same, but other parts of them are summed up first, which results show in their last bits.
  /// Lists of policies that choose on the CPU stay with it. Of device memory, each row that chooses takes what its
  /// output takes, and 4 bytes for each token that a KV head may attend. kFetchAuto: by the link's rate and the number
  /// of threads, of forwards with many lists (fetch_lists becomes 128), and 0 without a GPU; Engine::options() says
  /// how much. 0 or kFetchAuto with `stream`.
  float fetch_share = kFetchAuto;
  /// A forward with fewer lists, decode rows (or groups of drafts) times KV heads, fetches nothing of fetch_share: few
  /// lists are sooner attended by the CPU than a kernel that fetches has begun.
  std::uint32_t fetch_lists = 0;
  /// Tokens of a sequence up to which it attends all of them, and its policy chooses nothing: of so few, reading
  /// everything takes less than choosing. Buckets of no more max_tokens do without the stages that choose, unless the
  /// engine has cpu_sequences or cluster_sequences: sequences whose policies choose on the CPU or among clusters go on
  /// choosing. kDenseAuto: as many as near_bytes have room for, of each of largest.decode_rows sequences, up to where
  /// choosing pays on this device in a batch of so many; without a GPU, up to where the default policy pays on a CPU.
  /// Engine::options() says how many. With 0 nothing but the policy says what is attended, as published. [0, 2^31), or
  /// kDenseAuto
  std::uint32_t dense_tokens = 0;
  /// Policies that sequences will be begun with. An engine is built with room for what they want of sequences of
  /// largest.max_tokens: features of the largest bucket, and what EngineSizes has. Other policies are served as far as
  /// they want no more. One engine has digests of one kind, and copies of keys of one width. Engine::sizes() and
  /// Engine::options() say what it came to. A policy that attends everything or a share of the mass takes 4 bytes of
  /// device and pinned memory for each decode row, KV head and token of a sequence, and with `audit` as much in each
  /// layer: bound largest.max_tokens. Empty: room for what `largest` says, and for a window and a choice of one token.
  std::vector<PolicySpec> policies = default_policies();
  /// Of all buckets; forwards of smaller ones take no memory of their own. `policies` add the features that they want.
  /// Its max_tokens become what host_bytes hold if they are 0 or more than that, and whole pages. With `audit`, each
  /// row that chooses takes pinned memory for what it attends in all layers: 4 bytes for each token that it may. With
  /// `trace`, the threads that answer get 4 MiB.
  Bucket largest{};
  std::uint32_t in_flight = 2;   ///< forwards that are planned and not finished; [1, kMostForwards]
  std::uint32_t sequences = 16;  ///< that live at once
  /// Of them, at most, those whose policies choose on the CPU, if one of `policies` does: each has room for the queries
  /// of its prompt's newest tokens.
  std::uint32_t cpu_sequences = kAllSequences;
  /// What policies of these sequences may keep on the heap, which grows with their tokens; 0: no bound. Each sequence
  /// counts for the most that its policy may keep of the tokens it has, a fork in full: of its keys and values in bf16,
  /// if 4 query heads share a KV head, about 5% with clusters (tactic) and 7% with history (lfps; 8% of 8K tokens), of
  /// which 3% are what its newest 32 tokens have changed; more than these with hash tables (magicpig). What would
  /// exceed it is refused.
  std::uint64_t policy_bytes = 0;
  /// Of `sequences`, at most, those whose policies choose among clusters on the device (tactic | int4), if one of
  /// `policies` does: each has room in device memory for EngineSizes::max_clusters centroids of every layer and KV
  /// head, in float32, and 4 bytes for each token that a sequence may have.
  std::uint32_t cluster_sequences = kAllSequences;
  std::uint32_t import_rows = 512;  ///< tokens of one import
  /// Tokens of keys that a chunk of a prompt attends at a time, in device memory. If blocks of prompts are chosen, all
  /// that the largest bucket's longest sequence has.
  std::uint32_t prefill_window = 4096;
  PrefillSpec prefill{};  ///< how prompts attend
  /// Of host_bytes: what pages of named tokens may keep after their sequences have ended, until something needs it;
  /// see Engine::name_tokens. Costs nothing if no tokens are named. 0: only pages of sequences that live are found.
  std::uint64_t prefix_bytes = ~std::uint64_t{0};
  /// Pages are found, too, with tokens that were decoded by a policy that leaves some out: their keys and values are
  /// what came of that, and no prompt would have made them.
  bool prefix_decoded = false;
  /// That answer the far part; 0: one for each of its cores, beside a GPU less one. With nothing to answer they look at
  /// prompts, compare audited forwards, park and resume, with one thread more if there are cpu_sequences or audits.
  std::uint32_t threads = 0;
  /// That they run on, by the OS index of a PU of each. Empty: those that this process may use (of several processes
  /// that a launcher started without binding them, LOCAL_RANK of LOCAL_WORLD_SIZE, an equal part, of the device's own
  /// NUMA node first if each process sees all devices and uses that of its rank) and no engine has named; engines of a
  /// process that name none share them, in equal parts, each from its next plan on. One of those nearest to the device
  /// is left to the caller, if there are several.
  std::vector<std::uint32_t> cores{};
  bool pin_threads = true;
  /// What waits for the CPU's part of a layer; an engine's options say what automatic came to. Of Handover::stream the
  /// device must be able, see DeviceInfo; and EngineStats::waited_ns does not tell what its streams wait.
  Handover handover = Handover::automatic;
  /// A layer waits no longer for the far part: by the device's clock from when it begins to; from when the question is
  /// seen, and by the clock of a process that runs, where its kernels do not wait.
  std::chrono::milliseconds answer_timeout{1'000};
  std::chrono::milliseconds timeout{30'000};  ///< every wait of a call; [1 ms, 1 h]
  /// Called by a thread before each part of an answer or of a job: a look, an audit, a copy. For tests that stall it.
  std::function<void()> before_answer{};
};

/// What an engine has room for, of what its policies want beside the features of its largest bucket.
struct EngineSizes {
  std::uint32_t cpu_sequences = 0;      ///< that live at once and whose policies choose on the CPU
  std::uint32_t cluster_sequences = 0;  ///< that live at once and whose policies choose among clusters on the device
  std::uint32_t prompt_queries = 1;     ///< of a prompt's newest tokens, for each of cpu_sequences
  std::uint32_t max_picks = 1;          ///< tokens that a query head may choose on the device
  std::uint32_t max_ranked = 1;         ///< pages that a query head may choose
  std::uint32_t max_window = 1;         ///< sinks and recent tokens of a policy, together
  std::uint32_t max_clusters = 1;       ///< of a KV head, for each of cluster_sequences
  /// Of a channel of the copies of all keys by which the device chooses tokens, see CodeLayout: 4 (`int4`), or 3
  /// (`int3`), which takes head_dim / 8 bytes of device memory less for each token, layer and KV head, and tells tokens
  /// apart less well. 4 if no policy says it; 0, no copies, if none does and the largest bucket has scores of the
  /// caller
  std::uint32_t code_bits = 0;
  /// Of full pages, for policies that rank them (PageSourceOptions::digest): 2 * head_dim numbers of device memory for
  /// each page that host_bytes hold. None: no policy ranks pages
  std::optional<DigestKind> digests{};
  /// What histories of cpu_sequences propose lies ready for the device before a layer begins, which estimates and
  /// chooses of it while the CPU learns: where a policy's history tells the device (`history | int4`, top_k or top_p)
  /// and observes every fourth step or fewer, with Handover::device and a device given. Takes pinned memory of each of
  /// these sequences, a bit for each token, layer and query head.
  bool forecasts = false;
  friend bool operator==(const EngineSizes&, const EngineSizes&) = default;
};

/// The same options as an engine has them, but for what is left to its device: checked, with the features that
/// `policies` want, cpu_sequences and cluster_sequences as EngineSizes has them, and max_tokens of the largest bucket
/// as far as host_bytes hold them.
/// @throws Error{Errc::invalid_argument} naming the option; Error{Errc::unsupported} naming the policy
[[nodiscard]] EngineOptions resolved(const EngineOptions& options);

/// What an engine with these options would reserve, by component, without building it: far_pages, pinned, near_pages,
/// codes, digests (means of values among them) and buffers, as Engine::memory() says them later; the threads' own
/// `partials` depend on the machine. `device`: as for Engine; null: the embedded host device, which wants no scratch
/// memory, a GPU some.
/// @throws Error{Errc::invalid_argument}; Error{Errc::unsupported} if the device cannot serve the shape
[[nodiscard]] EngineMemoryUse memory_needed(const EngineOptions& options, Device* device = nullptr);

/// The most that EngineOptions::near_bytes may be for the engine to take no more of the device's memory than this, all
/// told: near rows and their tables, copies in codes and digests of all keys, clusters, buffers. 0: there is room for
/// these but not for near rows; none: not even for these. near_bytes of `options` do not count.
/// @throws as memory_needed
[[nodiscard]] std::optional<std::uint64_t> near_bytes_within(EngineOptions options, std::uint64_t device_bytes,
                                                             Device* device = nullptr);

}  // namespace sluice
