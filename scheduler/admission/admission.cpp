#include "sluice/admission.hpp"

#include <algorithm>
#include <iterator>
#include <list>
#include <string>
#include <unordered_map>
#include <utility>

#include "scheduler/admission/limits.hpp"
#include "scheduler/admission/pace.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

using scheduler::MemoryNeed;

/// A request that has not ended. Its tokens are those of the prompt that it came with, then those it was given.
struct Live {
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
struct Room {
  const AdmissionOptions& options;
  MemoryNeed taken{};
  std::uint64_t shared = 0;  ///< pages that `taken` counts more than once

  [[nodiscard]] bool has(const MemoryNeed& more) const noexcept {
    const MemoryNeed all = taken + more;
    return all.pages <= options.pages + shared && (options.near_pages == 0 || all.near_pages <= options.near_pages);
  }
};

}  // namespace

struct Admission::Impl {
  using Lives = std::list<Live>;

  AdmissionOptions options;
  Lives lives;  ///< in the order in which they came; those that run are the first ones
  std::unordered_map<RequestId, Lives::iterator> by_id;
  std::size_t running = 0;
  std::uint32_t on_cpu = 0;    ///< of those that run
  std::size_t turn_items = 0;  ///< of the open turn; 0: none is open
  bool has_room = false;       ///< for the next forward of those that run
  bool held_back = false;      ///< nothing is admitted beside those that run, see preempt
  scheduler::Pace pace;
  scheduler::PacedForward turn{};  ///< what the open turn's time goes by

  explicit Impl(const AdmissionOptions& given) : options(scheduler::resolved(given)) {}

  [[nodiscard]] MemoryNeed need(std::uint64_t tokens) const noexcept { return scheduler::need_of(options, tokens); }
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
  [[nodiscard]] std::uint32_t paced_chunk(const Live& live, std::uint32_t rows, bool first) const noexcept;
};

Admission::Impl::Lives::iterator Admission::Impl::find(RequestId request) const {
  const auto at = by_id.find(request);
  if (at == by_id.end())
    throw Error(Errc::not_found,
                "no request " + std::to_string(request.value) + " lives; it has ended, or was not submitted");
  return at->second;
}

void Admission::Impl::require_no_turn(const char* call) const {
  if (turn_items == 0) return;
  throw Error(Errc::invalid_argument, std::string(call) + ": a turn of " + std::to_string(turn_items) +
                                          " items is open; say what came of it with complete or fail first");
}

void Admission::Impl::require_turn(const char* call) const {
  if (turn_items != 0) return;
  throw Error(Errc::invalid_argument,
              std::string(call) + ": no turn is open; `next` opens one if there is anything to do");
}

void Admission::Impl::stop(Live& live) noexcept {
  live.running = false;
  --running;
  on_cpu -= live.request.on_cpu ? 1 : 0;
}

void Admission::Impl::remove(Lives::iterator at) noexcept {
  if (at->running) {
    stop(*at);
    held_back = false;
  }
  by_id.erase(at->request.id);
  lives.erase(at);
}

std::uint32_t Admission::Impl::chunk(const Live& live, std::uint32_t rows, bool first) const noexcept {
  const std::uint32_t left = live.prompt - live.done;
  if (left <= rows) return left;
  const std::uint32_t whole = (live.done + rows) / options.page_tokens * options.page_tokens;
  if (whole > live.done) return whole - live.done;
  return first ? rows : 0;
}

std::uint32_t Admission::Impl::paced_chunk(const Live& live, std::uint32_t rows, bool first) const noexcept {
  if (options.slowdown == 0.0) return chunk(live, rows, first);
  const std::uint32_t least = first ? std::min(options.page_tokens, rows) : 0;
  return chunk(live, pace.chunk(turn, live.done, least, rows, options.slowdown), first);
}

Room Admission::Impl::room(std::optional<std::uint64_t> held_pages) const noexcept {
  Room room{.options = options};
  std::uint64_t counted = 0;
  for (auto at = lives.begin(); at != lives.end() && at->running; ++at) {
    room.taken += need(at->wanted());
    counted += need(at->done).pages;
  }
  if (held_pages && *held_pages < counted) room.shared = counted - *held_pages;
  return room;
}

void Admission::Impl::preempt_youngest(std::vector<RequestId>& preempted) noexcept {
  Live& youngest = *std::prev(first_waiting());
  stop(youngest);
  youngest.prompt = youngest.tokens;
  youngest.done = youngest.cached = 0;
  preempted.push_back(youngest.request.id);
}

void Admission::Impl::make_room(Room& room, std::vector<RequestId>& preempted) noexcept {
  while (running > 1 && !room.has({})) {
    const Live& youngest = *std::prev(first_waiting());
    room.taken -= need(youngest.wanted());
    // Those before it began first: pages that it shares with them are among those that it began with.
    room.shared -= std::min(room.shared, need(youngest.cached).pages);
    preempt_youngest(preempted);
  }
}

bool Admission::Impl::can_admit(const Live& live, const Room& room) const noexcept {
  if (running >= most_running() || held_back) return false;
  if (live.request.on_cpu && on_cpu >= options.cpu_sequences) return false;
  const std::uint64_t last = scheduler::last_tokens(live.request);
  MemoryNeed wanted = need(std::min(std::uint64_t{live.prompt} + options.page_tokens, last));
  if (running != 0) wanted.pages += options.watermark_pages;
  return room.has(wanted);
}

Admission::Admission(const AdmissionOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Admission::Admission(Admission&&) noexcept = default;
Admission& Admission::operator=(Admission&&) noexcept = default;
Admission::~Admission() = default;

void Admission::submit(const AdmissionRequest& request) {
  if (impl_->by_id.contains(request.id))
    throw Error(Errc::invalid_argument, "request " + std::to_string(request.id.value) +
                                            " lives already; give every request a number of its own");
  scheduler::require_can_run(impl_->options, request);
  Impl::Lives one{{.request = request,
                   .tokens = request.prompt_tokens,
                   .prompt = request.prompt_tokens,
                   .left = request.max_new_tokens}};
  impl_->by_id.emplace(request.id, one.begin());
  impl_->lives.splice(impl_->lives.end(), one);
}

AdmissionChanges Admission::admit(std::optional<std::uint64_t> held_pages) {
  Impl& impl = *impl_;
  impl.require_no_turn("admit");
  AdmissionChanges changes;
  changes.preempt.reserve(impl.running);
  changes.admit.reserve(std::min(impl.most_running(), impl.lives.size()));
  Room room = impl.room(held_pages);
  impl.make_room(room, changes.preempt);
  for (auto at = impl.first_waiting(); at != impl.lives.end() && impl.can_admit(*at, room); ++at) {
    room.taken += impl.need(at->prompt);
    at->running = true;
    ++impl.running;
    impl.on_cpu += at->request.on_cpu ? 1 : 0;
    changes.admit.push_back(at->request.id);
  }
  impl.has_room = true;
  return changes;
}

void Admission::begun(RequestId request, std::uint32_t cached_tokens) {
  Live& live = *impl_->find(request);
  const std::string name = "begun: request " + std::to_string(request.value);
  if (!live.running || live.done != live.cached || live.turn != 0)
    throw Error(Errc::invalid_argument, name + (live.running ? " has computed some of its tokens" : " waits") +
                                            "; say what it began with between `admit`, which names it, and `next`");
  if (cached_tokens >= live.prompt)
    throw Error(Errc::invalid_argument, name + " began with " + std::to_string(cached_tokens) +
                                            " tokens of a prompt of " + std::to_string(live.prompt) +
                                            "; the last one is to be computed, as its output is wanted");
  live.cached = live.done = cached_tokens;
}

std::vector<RequestId> Admission::preempt(RequestId request) {
  Impl& impl = *impl_;
  const Live& live = *impl.find(request);
  impl.require_no_turn("preempt");
  std::vector<RequestId> preempted;
  preempted.reserve(impl.running);
  while (live.running) impl.preempt_youngest(preempted);
  if (!preempted.empty()) impl.held_back = impl.running != 0;
  return preempted;
}

std::vector<TurnItem> Admission::next(std::uint32_t chunk_tokens) {
  Impl& impl = *impl_;
  impl.require_no_turn("next");
  if (!impl.has_room) throw Error(Errc::invalid_argument, "next: call `admit` first, which makes room for the forward");
  std::vector<TurnItem> items;
  items.reserve(impl.running);
  const auto add = [&](Live& live, std::uint32_t tokens) {
    items.push_back({.request = live.request.id,
                     .tokens = tokens,
                     .first = live.done,
                     .prefill = live.in_prompt(),
                     .output = live.left != 0 && live.done + tokens >= live.prompt});
    live.turn = tokens;
  };
  const auto end = impl.first_waiting();
  for (auto at = impl.lives.begin(); at != end; ++at) {
    if (!at->in_prompt()) add(*at, 1);
  }
  impl.turn = {.decode_rows = static_cast<std::uint32_t>(items.size())};
  const std::uint32_t most = impl.options.prefill_rows;
  std::uint32_t rows = chunk_tokens == 0 ? most : std::min(chunk_tokens, most);
  std::uint32_t chunks = 0;
  for (auto at = impl.lives.begin(); at != end && chunks < impl.options.prefills; ++at) {
    if (!at->in_prompt()) continue;
    const bool first = chunks == 0;
    const std::uint32_t tokens = chunk_tokens == 0 ? impl.paced_chunk(*at, rows, first) : impl.chunk(*at, rows, first);
    if (tokens == 0) break;
    impl.turn.chunk_tokens += tokens;
    impl.turn.chunk_pairs += scheduler::PacedForward::pairs(at->done, tokens);
    add(*at, tokens);
    rows -= tokens;
    ++chunks;
  }
  impl.turn_items = items.size();
  return items;
}

std::vector<RequestId> Admission::complete(double seconds) {
  Impl& impl = *impl_;
  impl.require_turn("complete");
  std::vector<RequestId> ended;
  ended.reserve(impl.running);
  impl.pace.observe(impl.turn, seconds);
  const auto end = impl.first_waiting();
  for (auto at = impl.lives.begin(); at != end;) {
    Live& live = *at;
    const auto here = at++;
    if (live.turn == 0) continue;
    live.done += std::exchange(live.turn, 0);
    if (live.in_prompt()) continue;
    if (live.left != 0) {
      --live.left;
      ++live.tokens;
    }
    if (live.left != 0) continue;
    ended.push_back(live.request.id);
    impl.remove(here);
  }
  impl.turn_items = 0;
  impl.has_room = false;
  return ended;
}

void Admission::fail() {
  impl_->require_turn("fail");
  for (Live& live : impl_->lives) live.turn = 0;
  impl_->turn_items = 0;
}

void Admission::end(RequestId request) { impl_->remove(impl_->find(request)); }

std::vector<RequestId> Admission::running() const {
  std::vector<RequestId> ids;
  for (auto at = impl_->lives.begin(); at != impl_->lives.end() && at->running; ++at) ids.push_back(at->request.id);
  return ids;
}

AdmissionUse Admission::use() const noexcept {
  AdmissionUse use{.waiting = impl_->lives.size() - impl_->running, .running = impl_->running};
  for (auto at = impl_->lives.begin(); at != impl_->lives.end() && at->running; ++at) {
    const MemoryNeed need = impl_->need(at->reserved());
    use.pages += need.pages;
    use.near_pages += need.near_pages;
  }
  return use;
}

const AdmissionOptions& Admission::options() const noexcept { return impl_->options; }

}  // namespace sluice
