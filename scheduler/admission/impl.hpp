#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include "scheduler/admission/limits.hpp"
#include "scheduler/admission/pace.hpp"
#include "scheduler/admission/prompt_share.hpp"
#include "sluice/admission.hpp"

namespace sluice {

/// A request that has not ended. Its tokens are those of the prompt that it came with, then those it was given.
struct AdmissionLive {
  AdmissionRequest request;
  std::uint32_t tokens = 0;  ///< that there are
  std::uint32_t prompt = 0;  ///< of them, those that there were when it was admitted: computed as a prompt
  std::uint32_t left = 0;    ///< that it may still be given
  std::uint32_t cached = 0;  ///< that its sequence began with
  std::uint32_t done = 0;    ///< that its sequence has
  std::uint32_t turn = 0;    ///< of the open turn
  bool running = false;

  [[nodiscard]] bool in_prompt() const noexcept { return done < prompt; }
  /// Tokens that its sequence has room for: all of a prompt's from the start.
  [[nodiscard]] std::uint32_t reserved() const noexcept { return std::max(done + turn, prompt); }
  /// The same with the token that the next forward may add.
  [[nodiscard]] std::uint64_t wanted() const noexcept { return in_prompt() ? prompt : std::uint64_t{done} + 1; }
};

/// Memory while `admit` decides.
struct AdmissionRoom {
  const AdmissionOptions& options;
  scheduler::MemoryNeed taken{};
  std::uint64_t shared = 0;  ///< pages that `taken` counts more than once

  [[nodiscard]] bool has(const scheduler::MemoryNeed& more) const noexcept {
    const scheduler::MemoryNeed all = taken + more;
    return all.pages <= options.pages + shared && (options.near_pages == 0 || all.near_pages <= options.near_pages);
  }
};

struct Admission::Impl {
  using Live = AdmissionLive;
  using Lives = std::list<Live>;
  using Room = AdmissionRoom;
  using MemoryNeed = scheduler::MemoryNeed;

  AdmissionOptions options;
  Lives lives;  ///< in the order in which they came; those that run are the first ones
  std::unordered_map<RequestId, Lives::iterator> by_id;
  std::size_t running = 0;
  std::uint32_t on_cpu = 0;    ///< of those that run
  std::size_t turn_items = 0;  ///< of the open turn; 0: none is open
  bool has_room = false;       ///< for the next forward of those that run
  bool held_back = false;      ///< nothing is admitted beside those that run, see preempt
  scheduler::Pace pace;
  scheduler::PromptShare share;    ///< of forwards, beside rows that decode
  scheduler::PacedForward turn{};  ///< what the open turn's time goes by
  bool turn_prompts = false;       ///< in the open turn there were prompts to read

  explicit Impl(const AdmissionOptions& given) : options(scheduler::resolved(given)) {}

  [[nodiscard]] MemoryNeed need(std::uint64_t tokens) const noexcept { return scheduler::need_of(options, tokens); }
  /// Pages that a sequence with so many tokens holds at least between forwards, shared ones included.
  [[nodiscard]] std::uint64_t held_alone(std::uint64_t tokens) const noexcept;
  [[nodiscard]] std::size_t most_running() const noexcept { return std::min(options.sequences, options.decode_rows); }
  [[nodiscard]] Lives::iterator find(RequestId request) const;
  void require_no_turn(const char* call) const;
  void require_turn(const char* call) const;
  [[nodiscard]] Lives::iterator first_waiting() {
    return std::next(lives.begin(), static_cast<std::ptrdiff_t>(running));
  }
  /// What those that run need for the next forward.
  [[nodiscard]] Room room(std::optional<std::uint64_t> held_pages) const noexcept;
  /// Preempts the youngest until there is room for the others. `preempted` has room for all.
  void make_room(Room& room, std::vector<RequestId>& preempted) noexcept;
  [[nodiscard]] bool can_admit(const Live& live, const Room& room) const noexcept;
  void preempt_youngest(std::vector<RequestId>& preempted) noexcept;
  void stop(Live& live) noexcept;
  void remove(Lives::iterator at) noexcept;
  /// Rows of the next chunk of a prompt, of which the forward has as many left.
  [[nodiscard]] std::uint32_t chunk(const Live& live, std::uint32_t rows, bool first) const noexcept;
  /// The same, as far as the slowdown allows beside what the open turn has.
  [[nodiscard]] std::uint32_t paced_chunk(const Live& live, std::uint32_t rows, bool first) noexcept;
};

}  // namespace sluice
