// Requests in the order in which they came, and the rows of the next forward.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "scheduler/admission/impl.hpp"
#include "sluice/error.hpp"

namespace sluice {

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

std::uint32_t Admission::Impl::paced_chunk(const Live& live, std::uint32_t rows, bool first) noexcept {
  if (options.slowdown == 0.0) return chunk(live, rows, first);
  const std::uint32_t most = std::min(rows, live.prompt - live.done);
  const std::uint32_t allowed =
      first ? share.first_chunk(pace, turn.decode_rows, live.done, std::min(options.page_tokens, most), most,
                                options.slowdown)
            : share.next_chunk(pace, turn, live.done, most);
  return allowed == 0 ? 0 : chunk(live, allowed, first);
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
  Impl::Room room = impl.room(held_pages);
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
  Impl::Live& live = *impl_->find(request);
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
  const Impl::Live& live = *impl.find(request);
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
  const auto add = [&](Impl::Live& live, std::uint32_t tokens) {
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
  impl.turn_prompts = false;
  const std::uint32_t most = impl.options.prefill_rows;
  std::uint32_t rows = chunk_tokens == 0 ? most : std::min(chunk_tokens, most);
  std::uint32_t chunks = 0;
  for (auto at = impl.lives.begin(); at != end && chunks < impl.options.prefills; ++at) {
    if (!at->in_prompt()) continue;
    const bool first = chunks == 0;
    impl.turn_prompts = true;
    const std::uint32_t tokens = chunk_tokens == 0 ? impl.paced_chunk(*at, rows, first) : impl.chunk(*at, rows, first);
    if (tokens == 0) break;
    impl.turn.add_chunk(at->done, tokens);
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
  impl.share.settle(impl.pace, impl.turn, impl.turn_prompts, impl.options.slowdown);
  const auto end = impl.first_waiting();
  for (auto at = impl.lives.begin(); at != end;) {
    Impl::Live& live = *at;
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
  for (Impl::Live& live : impl_->lives) live.turn = 0;
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
    const scheduler::MemoryNeed need = impl_->need(at->reserved());
    use.pages += need.pages;
    use.near_pages += need.near_pages;
  }
  return use;
}

const AdmissionOptions& Admission::options() const noexcept { return impl_->options; }

}  // namespace sluice
