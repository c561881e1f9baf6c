// The controller of which requests run.
#include "sluice/admission.hpp"

#include <algorithm>
#include <span>

#include "capi/engine.hpp"
#include "capi/options.hpp"
#include "capi/sized.hpp"

/// What callers of C hold.
struct sluice_admission {
  explicit sluice_admission(const sluice::AdmissionOptions& options) : admission(options) {}
  sluice::Admission admission;
};

namespace sluice::capi {
namespace {

static_assert(offsetof(sluice_admission_options, window_resting_pages) + sizeof(std::uint64_t) ==
              sizeof(sluice_admission_options));
static_assert(offsetof(sluice_request, id) + sizeof(std::uint64_t) == sizeof(sluice_request));
static_assert(offsetof(sluice_turn_item, reserved) + sizeof(std::uint32_t) == sizeof(sluice_turn_item));
static_assert(offsetof(sluice_admission_use, near_pages) + sizeof(std::uint64_t) == sizeof(sluice_admission_use));

constexpr const char* kOptions = "sluice_admission_options";

sluice_admission_options from(const AdmissionOptions& options) noexcept {
  return {.struct_size = sizeof(sluice_admission_options),
          .decode_rows = options.decode_rows,
          .prefill_rows = options.prefill_rows,
          .prefills = options.prefills,
          .sequences = options.sequences,
          .cpu_sequences = options.cpu_sequences,
          .page_tokens = options.page_tokens,
          .max_tokens = options.max_tokens,
          .pages = options.pages,
          .watermark_pages = options.watermark_pages,
          .near_pages = options.near_pages,
          .near_pages_per_sequence = options.near_pages_per_sequence,
          .slowdown = options.slowdown,
          .page_blocks = options.page_blocks,
          .window_blocks = options.window_blocks,
          .window_pages = options.window_pages,
          .window_resting_pages = options.window_resting_pages};
}

AdmissionOptions to_admission(const sluice_admission_options& options) noexcept {
  return {.decode_rows = options.decode_rows,
          .prefill_rows = options.prefill_rows,
          .prefills = options.prefills,
          .sequences = options.sequences,
          .cpu_sequences = options.cpu_sequences,
          .page_tokens = options.page_tokens,
          .max_tokens = options.max_tokens,
          .pages = options.pages,
          .watermark_pages = options.watermark_pages,
          .near_pages = options.near_pages,
          .near_pages_per_sequence = options.near_pages_per_sequence,
          .slowdown = options.slowdown,
          .page_blocks = options.page_blocks,
          .window_blocks = options.window_blocks,
          .window_pages = options.window_pages,
          .window_resting_pages = options.window_resting_pages};
}

sluice_turn_item from(const TurnItem& item) noexcept {
  return {.struct_size = sizeof(sluice_turn_item),
          .tokens = item.tokens,
          .request = item.request.value,
          .first = item.first,
          .prefill = item.prefill ? 1u : 0u,
          .output = item.output ? 1u : 0u,
          .reserved = 0};
}

Admission& admission_of(sluice_admission* admission) {
  require_pointer(admission, "admission");
  return admission->admission;
}
const Admission& admission_of(const sluice_admission* admission) {
  require_pointer(admission, "admission");
  return admission->admission;
}

/// Requests that may run at once: a list has no more of them.
std::size_t most_listed(const Admission& admission) {
  return std::min(admission.options().sequences, admission.options().decode_rows);
}

/// Whether a list of whatever runs can be written there; to be asked before anything is done.
void require_list(const Admission& admission, const void* list, const std::size_t* count, const char* name) {
  require_pointer(list, name);
  require_pointer(count, (std::string(name) + "'s count").c_str());
  const std::size_t most = most_listed(admission);
  require(*count >= most, std::string(name) + " has room for " + std::to_string(*count) + ", and as many as " +
                              std::to_string(most) + " requests may run; give it room for these");
}

void write_ids(std::span<const RequestId> from, std::uint64_t* ids, std::size_t* count) noexcept {
  std::ranges::transform(from, ids, &RequestId::value);
  *count = from.size();
}

}  // namespace
}  // namespace sluice::capi

using namespace sluice;

sluice_status sluice_admission_options_init(sluice_admission_options* options, size_t struct_size) {
  return capi::guarded([&] { capi::init_sized(options, struct_size, capi::from(AdmissionOptions{}), capi::kOptions); });
}

sluice_status sluice_admission_options_of(const sluice_engine* engine, sluice_admission_options* options) {
  return capi::guarded([&] {
    capi::write_sized(capi::from(admission_options(capi::engine_of(engine).options())), options, capi::kOptions);
  });
}

sluice_status sluice_admission_create(const sluice_admission_options* options, sluice_admission** admission) {
  return capi::guarded([&] {
    capi::require_pointer(admission, "admission");
    *admission = nullptr;
    const auto given = capi::read_sized(options, capi::kOptions, capi::from(AdmissionOptions{}));
    *admission = std::make_unique<sluice_admission>(capi::to_admission(given)).release();
  });
}

void sluice_admission_destroy(sluice_admission* admission) { delete admission; }

sluice_status sluice_admission_get_options(const sluice_admission* admission, sluice_admission_options* options) {
  return capi::guarded(
      [&] { capi::write_sized(capi::from(capi::admission_of(admission).options()), options, capi::kOptions); });
}

sluice_status sluice_admission_submit(sluice_admission* admission, const sluice_request* request) {
  return capi::guarded([&] {
    Admission& to = capi::admission_of(admission);
    const sluice_request given = capi::read_sized(request, "sluice_request");
    to.submit({.id = RequestId{given.id},
               .prompt_tokens = given.prompt_tokens,
               .max_new_tokens = given.max_new_tokens,
               .on_cpu = capi::switch_of(given.on_cpu, "sluice_request.on_cpu")});
  });
}

sluice_status sluice_admission_admit(sluice_admission* admission, const uint64_t* held_pages, uint64_t* preempted,
                                     size_t* preempted_count, uint64_t* admitted, size_t* admitted_count) {
  return capi::guarded([&] {
    Admission& of = capi::admission_of(admission);
    capi::require_list(of, preempted, preempted_count, "preempted");
    capi::require_list(of, admitted, admitted_count, "admitted");
    const AdmissionChanges changes =
        of.admit(held_pages == nullptr ? std::nullopt : std::optional<std::uint64_t>(*held_pages));
    capi::write_ids(changes.preempt, preempted, preempted_count);
    capi::write_ids(changes.admit, admitted, admitted_count);
  });
}

sluice_status sluice_admission_begun(sluice_admission* admission, uint64_t request, uint32_t cached_tokens) {
  return capi::guarded([&] { capi::admission_of(admission).begun(RequestId{request}, cached_tokens); });
}

sluice_status sluice_admission_preempt(sluice_admission* admission, uint64_t request, uint64_t* ids, size_t* count) {
  return capi::guarded([&] {
    Admission& of = capi::admission_of(admission);
    capi::require_list(of, ids, count, "ids");
    capi::write_ids(of.preempt(RequestId{request}), ids, count);
  });
}

sluice_status sluice_admission_next(sluice_admission* admission, uint32_t chunk_tokens, sluice_turn_item* items,
                                    size_t* item_count) {
  return capi::guarded([&] {
    Admission& of = capi::admission_of(admission);
    capi::require_list(of, items, item_count, "items");
    capi::require_array(items, std::min(*item_count, capi::most_listed(of)), "sluice_turn_item");
    const std::vector<TurnItem> turn = of.next(chunk_tokens);
    for (std::size_t i = 0; i < turn.size(); ++i)
      capi::write_sized(capi::from(turn[i]), capi::element(items, i), "sluice_turn_item");
    *item_count = turn.size();
  });
}

sluice_status sluice_admission_complete(sluice_admission* admission, double seconds, uint64_t* ids, size_t* count) {
  return capi::guarded([&] {
    Admission& of = capi::admission_of(admission);
    capi::require_list(of, ids, count, "ids");
    capi::write_ids(of.complete(seconds), ids, count);
  });
}

sluice_status sluice_admission_fail(sluice_admission* admission) {
  return capi::guarded([&] { capi::admission_of(admission).fail(); });
}

sluice_status sluice_admission_end(sluice_admission* admission, uint64_t request) {
  return capi::guarded([&] { capi::admission_of(admission).end(RequestId{request}); });
}

sluice_status sluice_admission_running(const sluice_admission* admission, uint64_t* ids, size_t* count) {
  return capi::guarded([&] {
    const Admission& of = capi::admission_of(admission);
    capi::require_list(of, ids, count, "ids");
    capi::write_ids(of.running(), ids, count);
  });
}

sluice_status sluice_admission_get_use(const sluice_admission* admission, sluice_admission_use* use) {
  return capi::guarded([&] {
    const AdmissionUse now = capi::admission_of(admission).use();
    capi::write_sized(sluice_admission_use{.struct_size = sizeof(sluice_admission_use),
                                           .reserved = 0,
                                           .waiting = now.waiting,
                                           .running = now.running,
                                           .pages = now.pages,
                                           .near_pages = now.near_pages},
                      use, "sluice_admission_use");
  });
}
