#ifndef SLUICE_H
#define SLUICE_H

/// Sluice for C and languages that call C: attention for batches of sequences with keys and values in host memory.
/// The engine is the class sluice::Engine; sluice/engine.hpp says more of what it does. C99, no other headers needed.
///
/// Rules of all functions:
///
/// Status     What can fail returns a sluice_status, SLUICE_OK or why not; sluice_last_error() has the text, which
///            names cause and remedy. What failed changed nothing, and its results are not written, unless a function
///            says otherwise. Nothing prints, and nothing ends the process.
/// Versions   Every struct begins with struct_size, which the caller sets to its own sizeof. A library that knows
///            fewer fields than the caller takes the others if they are 0, and sets them to 0 where it writes; one that
///            knows more takes their defaults. The elements of an array all have the struct_size of the first one,
///            which is the distance between them. Fields and functions are only ever added.
/// Counts     Of arrays are compared with what they may be, such as layers or sequences, before an element is read; and
///            tensors whose sizes and strides reach further than memory does are refused.
/// Pointers   Must not be null unless it says so. What they point to is read or written before the call returns, but
///            for the data of tensors. Texts are UTF-8 and end with 0.
/// Streams    A cudaStream_t where the engine's device is a GPU. With the host device null, and everything has happened
///            when the call returns.
/// Threads    Calls with one engine must not overlap, but for sluice_engine_stats, which may be called at any time.
///            Different engines are independent. No call changes the CUDA device that is current.
/// Units      Tokens, bytes, milliseconds (_ms) and nanoseconds (_ns). A switch is 0 or 1.

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SLUICE_API __attribute__((visibility("default")))
#else
#define SLUICE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// Of this header. Rises with every release that adds something; what an older one has stays as it is, or the library's
/// soname changes.
#define SLUICE_ABI_VERSION 9u

/// SLUICE_ABI_VERSION of the library that is loaded: at least the caller's, or functions may be missing.
SLUICE_API uint32_t sluice_abi_version(void);
/// "0.2.0"; never null, never freed.
SLUICE_API const char* sluice_version(void);

/* ---------------------------------------------------------------------------------------------- errors */

typedef int sluice_status;
enum {
  SLUICE_OK = 0,
  SLUICE_INVALID_ARGUMENT = 1,  ///< an argument, option, tensor or call order breaks its documented range
  SLUICE_OUT_OF_CAPACITY = 2,   ///< a pool sized at creation is full, or this process gets no more memory or threads
  SLUICE_UNSUPPORTED = 3,       ///< valid, but this build or device has no kernel for it
  SLUICE_NOT_FOUND = 4,         ///< no such sequence or file
  SLUICE_CORRUPT = 5,           ///< a file contradicts itself
  SLUICE_IO = 6,                ///< the operating system refused to read or write
  SLUICE_DEVICE = 7,            ///< work of the device failed; the message carries the cause
  SLUICE_TIMEOUT = 8,           ///< a wait passed its deadline; it may be repeated
  SLUICE_INTERNAL = 9           ///< a defect of the library; please report it with its message
};

/// "ok", "invalid_argument", ...; "unknown" for what is no status. Never null, never freed.
SLUICE_API const char* sluice_status_name(sluice_status status);
/// Why the calling thread's newest call that failed did; "" if none has. Calls that succeed leave it alone. Valid until
/// the thread's next call that fails, or its end; never null.
SLUICE_API const char* sluice_last_error(void);

/* --------------------------------------------------------------------------------------------- tensors */

/// Where memory is, by DLPack's numbers.
typedef enum sluice_device_type {
  SLUICE_DEVICE_CPU = 1,           ///< ordinary host memory
  SLUICE_DEVICE_CUDA = 2,          ///< of a GPU
  SLUICE_DEVICE_CUDA_HOST = 3,     ///< pinned host memory
  SLUICE_DEVICE_CUDA_MANAGED = 13  ///< cudaMallocManaged's
} sluice_device_type;

/// A DLTensor as DLPack lays it out, by its name if dlpack.h was included before; otherwise a pointer to one may be
/// cast. Engines take [tokens, heads, head_dim] (ndim 3) of f32, f16 or bf16, 1 lane:
///   data         in memory that the engine's device reads: CPU or CUDA_HOST with the host device; with a GPU CUDA,
///                CUDA_MANAGED or CUDA_HOST, the first two with device_id of the engine's
///   strides      in elements, null: compact. The last one is 1; the others are free, and not negative. In what is
///                written, rows must not overlap.
///   byte_offset  of the first element from `data`; together a multiple of the element
#ifdef DLPACK_DLPACK_H_
typedef DLTensor sluice_tensor;
#else
typedef struct sluice_tensor {
  void* data;
  struct {
    int32_t device_type;  ///< sluice_device_type
    int32_t device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code;  ///< SLUICE_TYPE_FLOAT or SLUICE_TYPE_BFLOAT
    uint8_t bits;  ///< 32 or 16; 16
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} sluice_tensor;
#endif

enum { SLUICE_TYPE_FLOAT = 2, SLUICE_TYPE_BFLOAT = 4 };

/* --------------------------------------------------------------------------------------------- options */

/// sluice_engine_options.dense_tokens: what the engine finds best.
#define SLUICE_DENSE_AUTO 0xffffffffu
/// sluice_engine_options.fetch_share, likewise.
#define SLUICE_FETCH_AUTO (-1.0f)
/// cpu_sequences and cluster_sequences of sluice_engine_options: as many as live at once.
#define SLUICE_ALL_SEQUENCES 0xffffffffu
/// Element type of what an engine keeps. SLUICE_FP8_E4M3 (since version 4) halves the host memory of keys and values:
/// each row has a scale, a power of two, and what is rounded is the same wherever it lies, bf16 in device memory.
/// Tensors have none of it.
enum { SLUICE_F32 = 0, SLUICE_F16 = 1, SLUICE_BF16 = 2, SLUICE_FP8_E4M3 = 3 };
/// What stands for a full page's keys where policies rank pages.
enum { SLUICE_DIGESTS_NONE = 0, SLUICE_DIGESTS_BOX = 1, SLUICE_DIGESTS_CUBOID_MEAN = 2 };
/// How prompts attend: densely, in blocks that FlexPrefill chooses, or so where that pays.
enum { SLUICE_PREFILL_FULL = 0, SLUICE_PREFILL_FLEX = 1, SLUICE_PREFILL_AUTOMATIC = 2 };
/// Where chosen rows that are not near are attended: by the CPU, in place; or by the device, over the link.
enum { SLUICE_PLACE_HYBRID = 0, SLUICE_PLACE_STREAM = 1 };
/// What waits for the CPU's part of a layer: a kernel; the stream, by a memory operation; or the calling thread, in
/// sluice_engine_attend, which then cannot be captured. AUTO: as suits the device, a kernel unless it is shared by
/// MPS or limits how long kernels run.
enum { SLUICE_HANDOVER_AUTO = 0, SLUICE_HANDOVER_DEVICE = 1, SLUICE_HANDOVER_STREAM = 2, SLUICE_HANDOVER_HOST = 3 };
/// What rows of a bucket that choose may do; bits of its features.
enum {
  SLUICE_BUCKET_TOP_K = 1,      ///< some choose a number of tokens
  SLUICE_BUCKET_UNBOUNDED = 2,  ///< some choose a share of the mass, or attend everything
  SLUICE_BUCKET_PAGES = 4,      ///< some rank pages by their digests
  SLUICE_BUCKET_AUDIT = 8,      ///< what they attend is held against exact attention, see sluice_engine_audit
  SLUICE_BUCKET_REHEARSED = 16,  ///< some choose by rehearsed queries, see sluice_attend_args
  SLUICE_BUCKET_SCORES = 32      ///< some choose by scores that the caller brings, see sluice_attend_args
};

/// Everything that is fixed when an engine is created; sluice/engine.hpp says more of each field of
/// sluice::EngineOptions.
typedef struct sluice_engine_options {
  uint32_t struct_size;
  int32_t device_type;    ///< SLUICE_DEVICE_CPU (default), the embedded host device, or SLUICE_DEVICE_CUDA
  int32_t device_id;      ///< of the GPU, as CUDA counts them, CUDA_VISIBLE_DEVICES applied; 0 with the host device
  /// Of keys and values in memory: SLUICE_BF16 (default), SLUICE_F16, SLUICE_F32 (host device), SLUICE_FP8_E4M3
  int32_t kv_dtype;
  uint64_t device_bytes;  ///< most that is taken of the GPU's memory; 0 (default): what it has. 0 with the host device

  uint32_t layers;   ///< required, as the next three
  uint32_t q_heads;  ///< a multiple of kv_heads, at most 32 for each of them
  uint32_t kv_heads;
  uint32_t head_dim;     ///< 64 or 128 have tuned kernels; on the CPU any multiple of 16 up to 256, see value_dim
  uint64_t host_bytes;   ///< host memory for keys and values, reserved at once (1 GiB)
  uint64_t near_bytes;   ///< device memory for a cache of them (0)
  uint32_t page_tokens;  ///< a power of two in [8, 256] (16)
  uint32_t promotions;   ///< tokens of a layer and KV head that are brought near at a time, [0, 1024] (1024)
  uint32_t placement;    ///< SLUICE_PLACE_HYBRID
  uint32_t prefix_decoded;  ///< a switch: tokens that were decoded are found as parts of prompts, too (0)
  uint64_t prefix_bytes;    ///< of host_bytes, that pages of named tokens may keep which no sequence has (all of it)

  /// Of all buckets, see sluice_bucket: decode_rows (1), prefill_rows (0), prefills (0), max_tokens (0: all that
  /// host_bytes hold) and features (SLUICE_BUCKET_TOP_K).
  uint32_t largest_decode_rows;
  uint32_t largest_prefill_rows;
  uint32_t largest_prefills;
  uint32_t largest_max_tokens;
  uint32_t largest_features;

  uint32_t in_flight;       ///< forwards that are planned and not finished, [1, 8] (2)
  uint32_t sequences;       ///< that live at once (16)
  uint32_t cpu_sequences;   ///< of them, at most, those whose policies choose on the CPU (SLUICE_ALL_SEQUENCES)
  uint32_t unused_sizes[5];  ///< 0; before version 9 prompt_queries, max_picks, digests, max_ranked, max_window
  uint32_t import_rows;     ///< tokens of one import (512)
  uint32_t prefill_window;  ///< tokens of keys that a chunk of a prompt attends at a time (4096)

  uint32_t prefill_mode;        ///< SLUICE_PREFILL_FULL
  uint32_t prefill_min_budget;  ///< FlexPrefill: tokens, at least (1024) and
  uint32_t prefill_max_budget;  ///< at most, 0 (default): any
  uint32_t prefill_lines;       ///< a switch: blocks by lines, the paper's Algorithm 3 (0)
  float prefill_gamma;          ///< share of the attention that is enough, (0, 1] (0.95)
  float prefill_tau;            ///< [0, 1] (0.1)

  uint32_t threads;      ///< that answer the far part; 0 (default): one for each of its cores, beside a GPU less one
  uint32_t pin_threads;  ///< a switch (1)
  uint32_t answer_timeout_ms;  ///< a layer waits no longer for the far part, [1, 60000] (1000)
  uint32_t timeout_ms;         ///< every wait of a call, [1, 3600000] (30000)
  uint32_t core_count;         ///< of `cores`, at most the machine's; 0 (default): those that this process may use
  const uint32_t* cores;  ///< [core_count] that threads run on, by the OS index of a PU of each; null if there are none
  uint64_t policy_bytes;  ///< most that policies that choose on the CPU may keep on the heap; 0 (default): no bound

  float scale;            ///< what q.k is multiplied by; 0 (default): 1 / sqrt(head_dim)
  float softcap;          ///< a scaled logit x becomes softcap * tanh(x / softcap), at most 1000; 0 (default): it
                          ///< stays. Not beside prompts whose blocks are chosen, see prefill_mode
  uint32_t window_count;  ///< of `windows`: 0 (default) or `layers`
  uint32_t largest_drafts;  ///< of all buckets, see sluice_bucket (1); at most 32 * kv_heads / q_heads
  /// [window_count] of each layer the newest tokens that a row of it sees, its own included; 0: all. Null if there are
  /// none. With a window a row attends all that it sees; its sequence's policy chooses nothing there.
  const uint32_t* windows;
  /// Of layers with windows a sequence keeps the tokens that its next one sees, and as many before these, so that it
  /// can be forked or truncated by as many (64); at least largest_drafts - 1
  uint64_t window_slack;
  /// Since version 6: with SLUICE_PLACE_HYBRID, of the far tokens that the device chose the share that it attends over
  /// the link while the CPU attends the others, [0, 1], or SLUICE_FETCH_AUTO (it): by the rates of link and threads, in
  /// forwards with many lists, and 0 without a GPU; an engine's options say how much. 0 or that with SLUICE_PLACE_STREAM
  float fetch_share;
  /// Of `sequences`, at most, those whose policies choose among clusters of keys on the device, such as `tactic | int4`
  /// (SLUICE_ALL_SEQUENCES); if one of `policies` does, each has device memory for clusters of every layer and KV head
  uint32_t cluster_sequences;
  uint32_t unused_clusters;  ///< 0; before version 9 max_clusters
  /// Tokens of a sequence up to which it attends all of them, and its policy chooses nothing (0): of so few, reading
  /// everything takes less than choosing. SLUICE_DENSE_AUTO: as many as near_bytes have room for, of each of
  /// largest_decode_rows sequences, up to where choosing pays. Not of policies that choose on the CPU or among clusters
  uint32_t dense_tokens;
  uint32_t handover;      ///< SLUICE_HANDOVER_AUTO; an engine's options say what that came to
  uint32_t unused_forecasts;  ///< 0; before version 9 forecasts
  uint64_t unused_code_bits;  ///< 0; before version 9 code_bits
  /// A forward with fewer lists, decode rows (or groups of drafts) times KV heads, fetches nothing of fetch_share (0):
  /// few lists are sooner attended by the CPU than a kernel that fetches has begun. At least 128 with SLUICE_FETCH_AUTO
  uint64_t fetch_lists;
  /// 0 (default): values have head_dim elements. Else latent attention in absorbed form (DeepSeek V2 and V3: 512, with
  /// head_dim 576), on SLUICE_DEVICE_CPU: the value of a token is the first value_dim elements of its key, and `v` of
  /// calls is null; kv_heads is 1, q_heads any number, head_dim a multiple of 16 up to 576, value_dim one up to
  /// head_dim. What it does without is SLUICE_UNSUPPORTED: fp8, near_bytes, windows, drafts, audits, prefill modes but
  /// SLUICE_PREFILL_FULL, parking, and policies but those that attend everything or choose among all tokens by copies
  /// of keys (`exact | int4`) or scores
  uint64_t value_dim;
  /// Since version 8: policies that sequences will be begun with, as in sluice_engine_begin ("sluice"; so in structs
  /// of older versions). The engine has room for what they want of sequences of largest_max_tokens, beside what
  /// largest_features say: sluice_engine_sizes. Others are served as far as they want no more. One engine has digests
  /// of one kind, and copies of keys of one width. What an older program says of these sizes itself is refused
  uint64_t policy_count;
  const char* const* policies;  ///< [policy_count], at most 1024; null if there are none
} sluice_engine_options;

/// Sets all options to their defaults. `struct_size` is sizeof(sluice_engine_options). `policies` then lie in the
/// library.
SLUICE_API sluice_status sluice_engine_options_init(sluice_engine_options* options, size_t struct_size);
/// Since version 8: sets `options` to what an engine has that is created with them, but for what is left to its device:
/// the features that `policies` want, cpu_sequences and cluster_sequences, and as many max_tokens as host_bytes hold.
SLUICE_API sluice_status sluice_engine_options_resolve(sluice_engine_options* options);

/* ---------------------------------------------------------------------------------------------- engine */

typedef struct sluice_engine sluice_engine;

/// GPUs that this library can use; 0 without one, without a driver, or in a build without CUDA.
SLUICE_API uint32_t sluice_cuda_devices(void);
/// Reserves all memory. SLUICE_UNSUPPORTED if the device cannot serve the shape, or this build has no CUDA device.
/// *engine is to be destroyed, and null after an error.
SLUICE_API sluice_status sluice_engine_create(const sluice_engine_options* options, sluice_engine** engine);
/// What was enqueued on streams of the caller must have run. `engine` may be null.
SLUICE_API void sluice_engine_destroy(sluice_engine* engine);
/// As it was created with, max_tokens being what there is room for; cpu_sequences and cluster_sequences stay the bounds
/// that they were. `cores`, `windows` and `policies` are valid until the engine is destroyed.
SLUICE_API sluice_status sluice_engine_get_options(const sluice_engine* engine, sluice_engine_options* options);

/// What an engine has room for, of what its policies want beside the features of its largest bucket. Since version 8.
typedef struct sluice_engine_sizes {
  uint32_t struct_size;
  uint32_t prompt_queries;  ///< of a prompt's newest tokens, for each of cpu_sequences
  uint32_t max_picks;       ///< tokens that a query head may choose on the device
  uint32_t digests;         ///< of full pages: SLUICE_DIGESTS_*
  uint32_t max_ranked;      ///< pages that a query head may choose
  uint32_t max_window;      ///< sinks and recent tokens of a policy, together
  uint32_t max_clusters;    ///< of a KV head, for each of cluster_sequences
  uint32_t code_bits;       ///< of a channel of the copies of keys by which the device chooses: 4 or 3; 0: none
  /// A switch: what histories propose lies ready in pinned memory before a layer begins, so that a GPU chooses of it
  /// while the CPU learns. With SLUICE_HANDOVER_DEVICE; engines on SLUICE_DEVICE_CPU have it off
  uint32_t forecasts;
  // Since version 9:
  uint32_t cpu_sequences;      ///< that live at once and whose policies choose on the CPU
  uint32_t cluster_sequences;  ///< that live at once and whose policies choose among clusters on the device
} sluice_engine_sizes;
SLUICE_API sluice_status sluice_engine_get_sizes(const sluice_engine* engine, sluice_engine_sizes* sizes);

/// Since version 6: binds the calling thread, which does nothing but drive the engine, to the core that the engine's
/// threads leave to it, until sluice_engine_unpin_caller. Threads that it starts are bound with it.
/// SLUICE_UNSUPPORTED if there is no such core, or the system does not let it be bound.
SLUICE_API sluice_status sluice_engine_pin_caller(sluice_engine* engine);
/// Undoes that, on the same thread, before the engine is destroyed. Nothing if the thread is not bound.
SLUICE_API sluice_status sluice_engine_unpin_caller(sluice_engine* engine);

/* ------------------------------------------------------------------------------------------- sequences */

/// Number of a sequence; never used again within an engine.
typedef uint64_t sluice_sequence;

/// A sequence of no tokens. `policy` is a preset such as "sluice", or a composition such as
///   exact | int4 | top_p=0.95 | near=0
/// `sluice policies` lists them. SLUICE_INVALID_ARGUMENT points at the word that is wrong, SLUICE_UNSUPPORTED names
/// what the policy wants and the options do not have, SLUICE_OUT_OF_CAPACITY: as many live as may.
SLUICE_API sluice_status sluice_engine_begin(sluice_engine* engine, const char* policy, sluice_sequence* sequence);
/// A sequence that begins with what is known of a prompt: sluice_engine_tokens says how many of its first tokens it
/// has, whole pages, which it shares; the others are to come as they would without, the last one always. All of
/// ids [id_count] is named, see sluice_engine_name_tokens. `salt`: what else keys and values depend on besides the ids,
/// such as an adapter; what has another one is not found.
SLUICE_API sluice_status sluice_engine_begin_prompt(sluice_engine* engine, const char* policy, const int32_t* ids,
                                                    size_t id_count, uint64_t salt, sluice_sequence* sequence);
/// How many tokens a sequence would have that began like that now.
SLUICE_API sluice_status sluice_engine_match_prefix(const sluice_engine* engine, const char* policy,
                                                    const int32_t* ids, size_t id_count, uint64_t salt,
                                                    uint32_t* tokens);
/// Says which tokens those from position `first` on are, that the sequence has or is about to have: prompts to come are
/// held against them once they are there. Names end where tokens are taken back or do not come. Prompts that are found
/// attend as they would have; of tokens that were decoded see sluice/engine.hpp.
SLUICE_API sluice_status sluice_engine_name_tokens(sluice_engine* engine, sluice_sequence sequence, uint32_t first,
                                                   const int32_t* ids, size_t id_count);
/// Of a sequence that is to rest: gives up its near memory when the next forward is planned. Changes no token.
SLUICE_API sluice_status sluice_engine_preempt(sluice_engine* engine, sluice_sequence sequence);
/// A new sequence of the first `tokens` tokens of another one; they share memory. `policy` null: the other one's, with
/// what it had learnt by then, copied: it goes on as the other one would have. That holds for any policy without
/// history, and for history up to 32 tokens back (of more that query heads observe, fewer: see Engine in
/// sluice/engine.hpp); from further back the policy begins again, and the next token attends everything. No forward
/// with the sequence may be under way. SLUICE_TIMEOUT if a thread in which policies learn does not come back.
/// SLUICE_UNSUPPORTED if layers with windows have let go of what is seen behind so many tokens, see window_slack.
SLUICE_API sluice_status sluice_engine_fork(sluice_engine* engine, sluice_sequence sequence, uint32_t tokens,
                                            const char* policy, sluice_sequence* child);
/// Takes the newest tokens back, until there are `tokens`, and what was learnt from them, as far back as with fork.
/// Names of tokens behind those are forgotten. If there are as many, nothing changes. Errors as of fork.
SLUICE_API sluice_status sluice_engine_truncate(sluice_engine* engine, sluice_sequence sequence, uint32_t tokens);
/// Bytes that a sequence takes that is parked now. `model`: what keys and values are of, such as name and revision of a
/// model and its adapter, 4 KiB at most; null: "". Of the next two, too: resuming the sequence takes the same text.
/// SLUICE_NOT_FOUND if there is no such sequence; SLUICE_INVALID_ARGUMENT if a forward with it is under way, or `model`
/// is longer.
SLUICE_API sluice_status sluice_engine_park_bytes(const sluice_engine* engine, sluice_sequence sequence,
                                                  const char* model, uint64_t* bytes);
/// Writes all that a sequence is to area [area_bytes]: keys and values, policy, names of tokens, and queries of its
/// prompt's newest tokens. It stays as it is, until it is ended. *bytes, unless `bytes` is null: how many were written.
/// SLUICE_OUT_OF_CAPACITY if the area is too short, and nothing was written; SLUICE_TIMEOUT if a thread that copies does
/// not come back; others as of sluice_engine_park_bytes.
SLUICE_API sluice_status sluice_engine_park_memory(const sluice_engine* engine, sluice_sequence sequence,
                                                   const char* model, void* area, uint64_t area_bytes, uint64_t* bytes);
/// To a file that only its owner may read, which takes its name, and the place of one that had it, once all of it is on
/// the disk; a symbolic link of that name is replaced, and what it leads to stays. SLUICE_IO if the operating system
/// refuses: what had that name stays as it was, or, if the message says so, the new file is there but may not survive a
/// power cut. SLUICE_INVALID_ARGUMENT also if what has that name, or where a link of that name leads, is no ordinary
/// file; SLUICE_TIMEOUT, with what had that name as it was; others as of sluice_engine_park_bytes.
SLUICE_API sluice_status sluice_engine_park_file(const sluice_engine* engine, sluice_sequence sequence,
                                                 const char* model, const char* path);
/// A new sequence with all that was parked, in this engine or another one, which goes on as the other would have; a
/// policy that has learnt from tokens that were decoded begins anew. area [area_bytes] is what was written, all of it
/// and nothing else. SLUICE_CORRUPT if it is no parked sequence, or damaged; SLUICE_INVALID_ARGUMENT names what
/// differs: the version of the format, the shape, kv_dtype, windows or `model`, or of the policy what this library does
/// not know; SLUICE_UNSUPPORTED and SLUICE_OUT_OF_CAPACITY as of sluice_engine_begin, or if the sequence is longer than one
/// may be, or host_bytes have no room; SLUICE_DEVICE and SLUICE_TIMEOUT if the device fails, the latter also if a
/// thread that copies does not come back. Nothing has changed then, but that cached pages may have given way.
SLUICE_API sluice_status sluice_engine_resume_memory(sluice_engine* engine, const void* area, uint64_t area_bytes,
                                                     const char* model, sluice_sequence* sequence);
/// Likewise; SLUICE_NOT_FOUND if there is no such file, SLUICE_IO if it cannot be read, SLUICE_INVALID_ARGUMENT if it
/// is no ordinary one.
SLUICE_API sluice_status sluice_engine_resume_file(sluice_engine* engine, const char* path, const char* model,
                                                   sluice_sequence* sequence);
/// Appends tokens whose attention was computed elsewhere, one layer after the other in order, on one stream; the last
/// layer's call returns when they are in. k, v [tokens, kv_heads, head_dim] after RoPE, v null with value_dim, at most
/// import_rows tokens; q [n, q_heads, head_dim], n <= tokens: queries of the newest, for a policy that begins with
/// some; null: none, as is n of 0. One that does not get to its last layer is begun again with layer 0, or ends with the
/// sequence; until then no forward can be planned. No forward may be under way.
SLUICE_API sluice_status sluice_engine_import_prefix(sluice_engine* engine, sluice_sequence sequence, uint32_t layer,
                                                     const sluice_tensor* k, const sluice_tensor* v,
                                                     const sluice_tensor* q, void* stream);
/// No forward with the sequence may be under way.
SLUICE_API sluice_status sluice_engine_end(sluice_engine* engine, sluice_sequence sequence);
/// Tokens that all layers have.
SLUICE_API sluice_status sluice_engine_tokens(const sluice_engine* engine, sluice_sequence sequence, uint32_t* tokens);
/// Bytes of host memory in blocks that the sequence holds, shared ones included.
SLUICE_API sluice_status sluice_engine_far_bytes(const sluice_engine* engine, sluice_sequence sequence,
                                                 uint64_t* bytes);
/// Whether there is room for a new sequence of as many tokens beside what lives: *admitted is 1 or 0. cpu_sequences
/// count apart.
SLUICE_API sluice_status sluice_engine_can_admit(const sluice_engine* engine, uint32_t tokens, int* admitted);
/// The same, and whether the engine serves the policy, and has room for what it needs on the CPU: cpu_sequences,
/// policy_bytes. SLUICE_INVALID_ARGUMENT if the text is no policy.
SLUICE_API sluice_status sluice_engine_can_admit_policy(const sluice_engine* engine, const char* policy,
                                                        uint32_t tokens, int* admitted);

/* -------------------------------------------------------------------------------------------- forwards */

/// What a forward is made for, padding included. What `attend` enqueues follows from it alone, so that a forward can be
/// captured in a CUDA graph once for a bucket and replayed for every token. At most what the options' largest_* say.
typedef struct sluice_bucket {
  uint32_t struct_size;
  uint32_t decode_rows;   ///< rows that choose what they attend: new tokens, and drafts to verify
  uint32_t prefill_rows;  ///< rows of chunks of prompts, which attend all that comes before them
  uint32_t prefills;      ///< how many chunks these are
  uint32_t max_tokens;    ///< of the longest sequence, a multiple of page_tokens; 0: all that there is room for
  uint32_t features;      ///< SLUICE_BUCKET_*, ored; of no use without decode_rows
  /// 0 or 1: each of the decode_rows by itself. Else as many new tokens of a sequence, or fewer, attend together: what
  /// one of their heads chooses all of them attend, as far as they see it, and keys and values are read once for all.
  /// decode_rows is a multiple of it. Policies that choose on the CPU choose once for all, by the first of them;
  /// magicpig cannot.
  uint32_t drafts;
} sluice_bucket;

/// New tokens of one sequence, consecutive rows of a forward.
typedef struct sluice_plan_item {
  uint32_t struct_size;
  uint32_t tokens;
  sluice_sequence sequence;
  uint32_t prefill;   ///< a switch: a chunk of a prompt. 0: each row chooses as the sequence's policy says
  uint32_t reserved;  ///< 0
} sluice_plan_item;

/// Plans a forward and enqueues that on `stream`; SLUICE_UNSUPPORTED if that is captured. `items` [item_count] of different
/// sequences, whose rows are packed in their order; rows behind them are padding. Forwards run in the order of their
/// plans; enqueue all layers of one, or replay its graph, before the next is planned. Finish or cancel *forward.
SLUICE_API sluice_status sluice_engine_plan(sluice_engine* engine, const sluice_plan_item* items, size_t item_count,
                                            const sluice_bucket* bucket, void* stream, uint64_t* forward);
/// One layer of a forward of this bucket; layers come in order. Enqueues and returns. With rows = decode_rows +
/// prefill_rows: q, out [rows, q_heads, head_dim], k, v [rows, kv_heads, head_dim], touched on `stream` only; with
/// value_dim v is null, and out [rows, q_heads, value_dim]; lse [rows, q_heads], f32, compact, natural log of the sum
/// of exponentials, may be null. Rows of padding get 0. While `stream` is captured nothing runs. After SLUICE_DEVICE the
/// forward can only be cancelled.
SLUICE_API sluice_status sluice_engine_attend(sluice_engine* engine, const sluice_bucket* bucket, uint32_t layer,
                                              const sluice_tensor* q, const sluice_tensor* k, const sluice_tensor* v,
                                              const sluice_tensor* out, const sluice_tensor* lse, void* stream);
/// The same of a bucket with SLUICE_BUCKET_REHEARSED, for policies with the stage `rehearsed`, such as infinigen, which
/// choose by a query that is known before its layer begins. `rehearsed`, in every layer but the first, where it may be
/// null: as q, what the attention input of the layer before, as that layer has normalised it, gives with this layer's
/// query weights, after RoPE. Other policies, and layers of other buckets, do not look at it.
SLUICE_API sluice_status sluice_engine_attend_rehearsed(sluice_engine* engine, const sluice_bucket* bucket,
                                                        uint32_t layer, const sluice_tensor* q, const sluice_tensor* k,
                                                        const sluice_tensor* v, const sluice_tensor* rehearsed,
                                                        const sluice_tensor* out, const sluice_tensor* lse,
                                                        void* stream);
/// All that a layer of a forward may be given. Set to 0 first.
typedef struct sluice_attend_args {
  uint32_t struct_size;
  uint32_t layer;                  ///< layers come in order
  const sluice_tensor* q;          ///< as of sluice_engine_attend, and so the next four
  const sluice_tensor* k;
  const sluice_tensor* v;
  const sluice_tensor* out;
  const sluice_tensor* lse;        ///< may be null
  const sluice_tensor* rehearsed;  ///< as of sluice_engine_attend_rehearsed; null: none
  /// [decode_rows or more, kv_heads or 1, max_tokens of the bucket or more], f32: element t of a row is the score of
  /// the sequence's token t for one of its KV heads, or for all of them. Row i is of the forward's i-th token that is
  /// decoded, in the order of the plan's items, prompts left out. Wanted in all layers without a window of buckets with
  /// SLUICE_BUCKET_SCORES, for policies with the source `scores`, and ignored otherwise, as are rows of other policies,
  /// what a layer attends anyway, and tokens that a row does not see. Larger scores are chosen first, of equal ones the
  /// earlier token; -infinity comes behind all numbers, NaN behind that. Budget `top_p` takes scores as natural
  /// logarithms of weights, without scale or softcap. Null: none.
  const sluice_tensor* scores;
  void* stream;                    ///< a cudaStream_t; null with the host device
} sluice_attend_args;
/// sluice_engine_attend of a bucket of any features. Since version 7.
SLUICE_API sluice_status sluice_engine_attend_layer(sluice_engine* engine, const sluice_bucket* bucket,
                                                    const sluice_attend_args* args);
/// Waits until the forward has run; then its sequences have their new tokens. SLUICE_DEVICE if it did not get to its
/// end: none of them has, outputs may be NaN, and it can be planned again. SLUICE_TIMEOUT: it can be waited for again,
/// or cancelled.
SLUICE_API sluice_status sluice_engine_finish(sluice_engine* engine, uint64_t forward);
/// Takes a plan back and all behind it; no sequence has its new tokens.
SLUICE_API sluice_status sluice_engine_cancel(sluice_engine* engine, uint64_t forward);

/* ------------------------------------------------------------------------------------------- admission */

/// Decides which requests run, and which of their tokens the next forward has: first come, first served. It knows no
/// engine; sluice/admission.hpp says more of the class sluice::Admission, and how its calls go together. Calls with one
/// must not overlap.
///
/// Lists of requests: `ids` [*count] has room for as many as may run at once, the smaller of decode_rows and sequences,
/// at least; *count becomes how many there are.
typedef struct sluice_admission sluice_admission;

/// What is shared out; sluice::AdmissionOptions.
typedef struct sluice_admission_options {
  uint32_t struct_size;
  uint32_t decode_rows;    ///< of a forward; as many requests run at once, at most (1)
  uint32_t prefill_rows;   ///< rows of chunks of prompts in a forward (512)
  uint32_t prefills;       ///< chunks of prompts in a forward (1)
  uint32_t sequences;      ///< requests that run at once, at most (16)
  uint32_t cpu_sequences;  ///< of them, those whose policies choose on the CPU (0)
  uint32_t page_tokens;    ///< (16)
  uint32_t max_tokens;     ///< of a sequence, at most; 0 (default): all that `pages` hold
  uint64_t pages;          ///< required: host memory, in pages of all layers and KV heads
  uint64_t watermark_pages;  ///< that the admission of a request leaves free while others run (0)
  uint64_t near_pages;       ///< device memory that all that run share, in pages; 0 (default): no bound
  uint64_t near_pages_per_sequence;  ///< of these, what each takes, at most; 0 (default): all pages that it has
  /// Beside chunks of prompts, rows that decode come this many times as slowly as alone on the average, by what
  /// sluice_admission_complete was told; 0 (default): chunks have all prefill_rows in every forward. Else in [1, 1000].
  double slowdown;
  /// Blocks, which `pages` and watermark_pages count, that each page of a sequence takes (1), and that each of its
  /// newest window_pages pages takes beside them (0, 0): of layers with windows.
  uint32_t page_blocks;
  uint32_t window_blocks;
  uint64_t window_pages;
  /// Of these, what a sequence of which no forward is under way holds at least (0).
  uint64_t window_resting_pages;
} sluice_admission_options;

typedef struct sluice_request {
  uint32_t struct_size;
  uint32_t prompt_tokens;   ///< at least 1
  uint32_t max_new_tokens;  ///< 0: its prompt is computed, and that is all
  uint32_t on_cpu;          ///< a switch: its policy chooses on the CPU
  uint64_t id;              ///< the caller's number
} sluice_request;

/// Tokens of one request, consecutive rows of a forward.
typedef struct sluice_turn_item {
  uint32_t struct_size;
  uint32_t tokens;
  uint64_t request;
  uint32_t first;     ///< position of the first one among the prompt's tokens and the request's own
  uint32_t prefill;   ///< 1: a chunk of a prompt
  uint32_t output;    ///< 1: the last row's output is the request's next token
  uint32_t reserved;  ///< 0
} sluice_turn_item;

typedef struct sluice_admission_use {
  uint32_t struct_size;
  uint32_t reserved;    ///< 0
  uint64_t waiting;     ///< requests
  uint64_t running;     ///< requests
  uint64_t pages;       ///< of those that run; shared ones count for each of them
  uint64_t near_pages;  ///< likewise
} sluice_admission_use;

/// Sets all options to their defaults. `struct_size` is sizeof(sluice_admission_options).
SLUICE_API sluice_status sluice_admission_options_init(sluice_admission_options* options, size_t struct_size);
/// The same for an engine: its largest bucket, sequences, and the pages that its host_bytes hold.
SLUICE_API sluice_status sluice_admission_options_of(const sluice_engine* engine, sluice_admission_options* options);
/// *admission is to be destroyed, and null after an error.
SLUICE_API sluice_status sluice_admission_create(const sluice_admission_options* options,
                                                 sluice_admission** admission);
/// `admission` may be null.
SLUICE_API void sluice_admission_destroy(sluice_admission* admission);
/// As it was created with, max_tokens being what there is room for.
SLUICE_API sluice_status sluice_admission_get_options(const sluice_admission* admission,
                                                      sluice_admission_options* options);
/// A request that waits from now on. SLUICE_OUT_OF_CAPACITY if it could not run to its end though it were alone.
SLUICE_API sluice_status sluice_admission_submit(sluice_admission* admission, const sluice_request* request);
/// Requests that lose memory (`preempted`, youngest first: end their sequences, they come again with all tokens so
/// far as prompts), and those that get some (`admitted`, oldest first: begin a sequence each). `held_pages`: null, or
/// the pages that the sequences hold by the engine's count, where shared ones count once.
SLUICE_API sluice_status sluice_admission_admit(sluice_admission* admission, const uint64_t* held_pages,
                                                uint64_t* preempted, size_t* preempted_count, uint64_t* admitted,
                                                size_t* admitted_count);
/// The sequence of a request that was admitted began with as many tokens of its prompt.
SLUICE_API sluice_status sluice_admission_begun(sluice_admission* admission, uint64_t request, uint32_t cached_tokens);
/// Preempts a request and all younger ones, as the engine had no room for it; `ids` are those that ran. Nothing is
/// admitted until one of the others has ended.
SLUICE_API sluice_status sluice_admission_preempt(sluice_admission* admission, uint64_t request, uint64_t* ids,
                                                  size_t* count);
/// The next forward, after sluice_admission_admit: items [*item_count] with room as lists of requests have;
/// *item_count becomes how many there are. If there are any, a turn is open until it is completed or has failed.
/// `chunk_tokens`: rows of prompts in this forward, at most; 0: as `slowdown` has it.
SLUICE_API sluice_status sluice_admission_next(sluice_admission* admission, uint32_t chunk_tokens,
                                               sluice_turn_item* items, size_t* item_count);
/// The turn's forward has been finished; `ids` are requests that have all their tokens, which are gone. `seconds`: that
/// it took, a model's own work included; 0 if it was not measured.
SLUICE_API sluice_status sluice_admission_complete(sluice_admission* admission, double seconds, uint64_t* ids,
                                                   size_t* count);
/// It came to nothing: the same rows are to come again.
SLUICE_API sluice_status sluice_admission_fail(sluice_admission* admission);
/// A request has all that it wants, or is wanted no longer. May be called while a turn is open.
SLUICE_API sluice_status sluice_admission_end(sluice_admission* admission, uint64_t request);
/// Requests that run, oldest first.
SLUICE_API sluice_status sluice_admission_running(const sluice_admission* admission, uint64_t* ids, size_t* count);
SLUICE_API sluice_status sluice_admission_get_use(const sluice_admission* admission, sluice_admission_use* use);

/* --------------------------------------------------------------------------------------------- figures */

/// What an engine has done so far; sluice::EngineStats.
typedef struct sluice_stats {
  uint32_t struct_size;
  uint32_t reserved;       ///< 0
  uint64_t asked;          ///< layers whose far part the CPU was asked for
  uint64_t unplanned;      ///< replays without a plan of their own
  uint64_t near_tokens;    ///< attended in device memory, by all rows that choose, layers and KV heads
  uint64_t far_tokens;     ///< and in place, by the CPU
  uint64_t fetched_tokens; ///< and by the device over the link
  uint64_t promoted;       ///< tokens brought near, by layers and KV heads
  uint64_t scored;         ///< keys that policies read to choose on the CPU
  uint64_t estimated;      ///< keys whose copies the device was to read to choose
  uint64_t ranked_pages;   ///< pages whose digests it was to read
  uint64_t waited_ns;      ///< that the device waited for the CPU's answers
  uint64_t answer_ns;      ///< from when a thread saw a question until it was answered
  uint64_t sparse_chunks;  ///< of prompts: (layer, chunk) pairs where blocks were chosen
  uint64_t dense_chunks;   ///< and the others
  uint64_t kept_blocks;    ///< (query head, query block, key block) triples computed where they were chosen
  uint64_t causal_blocks;  ///< and what dense attention would have computed there
  uint64_t matched_tokens;  ///< of prompts, that sequences began with
  uint64_t evicted_blocks;  ///< kept for prompts to come, until something else needed them
  // Since version 6:
  uint64_t missed;  ///< choices of query heads for which all scores were read once more
  uint64_t stalls;  ///< plans that waited until a policy had looked at a prompt
  uint64_t awaited;  ///< layers whose choice waited for what histories propose, which is part of waited_ns
  uint64_t drawn_heads;  ///< choices of query heads that drew what they attend (budget stage sample)
  uint64_t error_bars;   ///< sum of their relative standard errors, in millionths
  uint64_t wide_bars;    ///< how many of these were above 10%
} sluice_stats;

/// Memory of an engine in bytes, all but `policies` and `prefixes` reserved when it is created;
/// sluice::EngineMemoryUse.
typedef struct sluice_memory {
  uint32_t struct_size;
  uint32_t reserved;         ///< 0
  uint64_t far_pages;        ///< host: keys and values
  uint64_t far_pages_used;   ///< of these, in blocks that sequences hold; shared ones count once
  uint64_t far_pages_cached;  ///< and in blocks that no sequence has, kept for prompts to come
  uint64_t prefixes;         ///< host, not reserved: names of tokens, and what finds pages by them
  uint64_t pinned;           ///< host: what device and threads share
  uint64_t partials;         ///< host: the threads' own
  uint64_t policies;         ///< host: what policies that choose on the CPU have learnt
  uint64_t near_pages;       ///< device
  uint64_t near_pages_used;  ///< of these, when the newest forward ended
  uint64_t codes;            ///< device: copies of keys, of code_bits a channel
  uint64_t digests;          ///< device: of full pages, means of their values among them
  uint64_t buffers;          ///< device: everything else
} sluice_memory;

/// Memory of one sequence in bytes: of the host, but for what is near; sluice::SequenceMemoryUse.
typedef struct sluice_sequence_memory {
  uint32_t struct_size;
  uint32_t reserved;          ///< 0
  uint64_t far_pages;         ///< keys and values, in blocks that it holds
  uint64_t far_pages_shared;  ///< of these, in blocks that stay if it ends
  uint64_t policy;            ///< heap: what its policy has learnt
  uint64_t names;             ///< heap: names of its tokens
  uint64_t tail;              ///< pinned: queries of its prompt's newest tokens
  // Since version 6:
  uint64_t near_pages;         ///< device: rows of these blocks that lie near, as it has them when asked
  uint64_t near_pages_shared;  ///< of these, in blocks that others hold or names keep
} sluice_sequence_memory;

/// What audits of a sequence found, over all layers, query heads and audited tokens. Shares are in [0, 1], their
/// percentiles exact to 0.001; all 0 if nothing was audited.
typedef struct sluice_audit {
  uint32_t struct_size;
  uint32_t top_k;            ///< tokens with the largest scores that `overlap` is about
  uint32_t layers;           ///< 0 if nothing was audited
  uint32_t q_heads;          ///< as many heads per layer as sluice_engine_audit_heads tells of; likewise
  uint64_t tokens;           ///< audited
  uint64_t attended_tokens;  ///< by the query heads of a group together, summed over layers and KV heads
  uint64_t dense_tokens;     ///< and those that there were
  uint64_t bypassed_heads;   ///< query heads that attended nothing, summed over layers
  uint64_t coverage_count;
  double coverage_mean;  ///< share of the exact softmax that was attended
  double coverage_min;
  double coverage_p5;  ///< 5% of the samples lie below
  double coverage_p50;
  uint64_t overlap_count;
  double overlap_mean;  ///< share of the top_k tokens that was attended
  double overlap_min;
  uint64_t watched_count;
  double watched_mean;  ///< share of the watched tokens' mass that was attended, where they held 1%
  double watched_min;
} sluice_audit;

/// The same for one (layer, query head): means over the audited steps; sluice::HeadAudit.
typedef struct sluice_head_audit {
  uint32_t struct_size;
  uint32_t reserved;  ///< 0
  uint64_t steps;
  uint64_t bound_broken;   ///< steps whose error was above error_bound
  uint64_t watched_steps;  ///< steps in which watched tokens held 1%
  double coverage;         ///< share of the exact softmax that was attended
  double coverage_min;
  double overlap;         ///< share of the tokens with the largest scores that was attended
  double error;           ///< L2 norm of output minus exact output
  double relative_error;  ///< the same over the norm of the exact output
  double error_bound;     ///< 2 (1 - coverage) max |v|
  double watched_mass;    ///< the watched tokens' exact share
  double watched_kept;    ///< the attended part of that share, relative to it
} sluice_head_audit;

/// May be called at any time, also while forwards run and other calls do.
SLUICE_API sluice_status sluice_engine_stats(const sluice_engine* engine, sluice_stats* stats);
SLUICE_API sluice_status sluice_engine_memory(const sluice_engine* engine, sluice_memory* memory);
/// What an engine with these options would reserve, without creating it: far_pages, pinned, near_pages, codes, digests
/// and buffers, as sluice_engine_memory says them later; the others are 0. Errors as of sluice_engine_create, but that
/// memory may be short.
SLUICE_API sluice_status sluice_engine_options_memory_needed(const sluice_engine_options* options,
                                                             sluice_memory* memory);
/// The most that `near_bytes` may be for an engine to take no more than `device_bytes` of the device's memory, all
/// told: near rows and their tables, copies and digests of all keys, clusters, buffers. near_bytes of `options` do not
/// count. SLUICE_OUT_OF_CAPACITY if there is no room for what is not near; else errors as of the call above.
SLUICE_API sluice_status sluice_engine_options_near_within(const sluice_engine_options* options, uint64_t device_bytes,
                                                           uint64_t* near_bytes);
/// Asks the device what is near, once between two forwards. SLUICE_NOT_FOUND if there is no such sequence;
/// SLUICE_TIMEOUT or SLUICE_DEVICE if the device does not say.
SLUICE_API sluice_status sluice_engine_sequence_memory(const sluice_engine* engine, sluice_sequence sequence,
                                                       sluice_sequence_memory* memory);
/// Tokens whose attendance audits report apart, such as those that hold the answer to a question: positions [count],
/// which need not exist yet, at most as many as a sequence may have. Replaces those of an earlier call; `tokens` may be
/// null if `count` is 0.
SLUICE_API sluice_status sluice_engine_watch(sluice_engine* engine, sluice_sequence sequence, const uint32_t* tokens,
                                             size_t count);
/// What the sequence's rows attended in forwards of buckets with SLUICE_BUCKET_AUDIT, against exact attention. Such a
/// forward runs alone.
SLUICE_API sluice_status sluice_engine_audit(const sluice_engine* engine, sluice_sequence sequence,
                                             sluice_audit* audit);
/// The same head by head: `heads` [layers, q_heads], head_count of them; all 0 if nothing was audited.
SLUICE_API sluice_status sluice_engine_audit_heads(const sluice_engine* engine, sluice_sequence sequence,
                                                   sluice_head_audit* heads, size_t head_count);

#ifdef __cplusplus
}
#endif

#endif
