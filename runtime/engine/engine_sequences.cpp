// How sequences of an Engine begin, fork, give tokens up and end.
#include <algorithm>
#include <string>
#include <utility>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {

Engine::Impl::Sequence& Engine::Impl::at(SequenceId id) {
  const auto found = sequences.find(id.value);
  if (found == sequences.end())
    throw Error(Errc::not_found,
                "there is no sequence " + text(id.value) + "; it has ended, or this engine never had it");
  return found->second;
}

bool Engine::Impl::imports(SequenceId id) const noexcept {
  return importing != 0 && programs.newest().items.front().sequence == id;
}

Engine::Impl::Sequence& Engine::Impl::resting(SequenceId id, const char* what) {
  Sequence& sequence = at(id);
  if (imports(id))
    throw Error(Errc::invalid_argument, std::string(what) + ": sequence " + text(id.value) +
                                            " is being imported; give it its other layers first");
  if (programs.has(id))
    throw Error(Errc::invalid_argument, std::string(what) + ": sequence " + text(id.value) +
                                            " is part of a forward under way; finish or cancel it first");
  return sequence;
}

void Engine::Impl::require_place(const PolicySpec& spec, std::uint32_t tokens) const {
  if (free_lists.empty())
    throw Error(Errc::out_of_capacity, "as many sequences live as EngineOptions::sequences says; end one first");
  if (scheduler::chooser(spec) == scheduler::Chooser::cpu && free_tails.empty())
    throw Error(
        Errc::out_of_capacity,
        "as many sequences live as EngineOptions::cpu_sequences says whose policies choose on the CPU, " +
            text(sizes.cpu_sequences) +
            (sizes.cpu_sequences == 0 ? "; name the policy in EngineOptions::policies, and leave cpu_sequences out"
                                      : "; raise it, or end one first"));
  if (scheduler::clusters_on_device(spec) && free_clusters.empty())
    throw Error(Errc::out_of_capacity,
                "as many sequences live as EngineOptions::cluster_sequences says whose policies choose among clusters "
                "on the device, " +
                    text(sizes.cluster_sequences) + "; raise it, or end one first");
  require_policy_room(policy_share(spec, tokens));
}

SequenceId Engine::Impl::add(const PolicySpec& spec, std::uint32_t tokens) {
  require_place(spec, tokens);
  const SequenceId id{next_id};
  std::vector<runtime::PageList> lists;
  for (std::uint32_t stack = 0; stack < memory.stacks().count(); ++stack)
    lists.emplace_back(stack * options.sequences + free_lists.back(), memory.largest().max_pages);
  Sequence& sequence =
      sequences.emplace(id.value, Sequence{.spec = spec, .lists = std::move(lists)}).first->second;
  for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer)
    sequence.sparse_layers += spec.dense(layer) || memory.largest().window_in(layer) != 0 ? 0 : 1;
  free_lists.pop_back();
  if (scheduler::chooser(spec) == scheduler::Chooser::cpu) {
    sequence.tail.slot = free_tails.back();
    free_tails.pop_back();
  }
  if (scheduler::clusters_on_device(spec)) {
    sequence.clusters = {.slot = free_clusters.back(), .schedule = scheduler::ClusterSchedule(spec.clusters)};
    free_clusters.pop_back();
  }
  ++next_id;
  return id;
}

SequenceId Engine::Impl::begin(const PolicySpec& policy) {
  sluice::validate(policy);
  require_served(policy);
  return add(policy);
}

SequenceId Engine::Impl::fork(SequenceId id, std::uint32_t tokens, const PolicySpec* policy) {
  if (policy != nullptr) {
    sluice::validate(*policy);
    require_served(*policy);
  }
  const Sequence& parent = resting(id, "fork");
  if (tokens > parent.tokens)
    throw Error(Errc::invalid_argument, "fork: sequence " + text(id.value) + " has " + text(parent.tokens) +
                                            " tokens, and " + text(tokens) +
                                            " are asked for; fork it with no more than it has");
  require_windows(id, parent, tokens, "fork");
  const PolicySpec& spec = policy != nullptr ? *policy : parent.spec;
  require_place(spec, tokens);  // Before anything is copied.
  Sequence::Names names = names_of(parent, tokens);
  learn_before_sharing(parent, tokens);
  std::shared_ptr<runtime::SequencePolicy> learnt = policy != nullptr ? nullptr : policy_of(parent, tokens);
  const SequenceId id_of_child = add(spec, tokens);
  Sequence& child = at(id_of_child);
  for (std::size_t stack = 0; stack < child.lists.size(); ++stack)
    child.lists[stack].share(parent.lists[stack], pages_of(tokens), table);
  child.tokens = child.planned = tokens;
  if (tokens != 0) child.first_kept = parent.first_kept;
  child.bets = parent.bets;
  child.names = std::move(names);
  if (policy == nullptr && child.clusters.slot != kNone) {
    child.clusters.schedule = parent.clusters.schedule;  // The device makes the child its own, of the same tokens.
    child.clusters.truncate(tokens);
  }
  if (child.tail.slot != kNone && parent.tail.slot != kNone) copy_tail(parent, child);
  if (!learnt) return id_of_child;
  learnt->read_from(child.pages().blocks());
  child.policy = std::move(learnt);
  child.policy_tokens = parent.policy_tokens;
  child.policy_end = tokens;
  child.policy_forward = parent.policy_forward;
  return id_of_child;
}

void Engine::Impl::truncate(SequenceId id, std::uint32_t tokens) {
  Sequence& sequence = resting(id, "truncate");
  if (tokens > sequence.tokens)
    throw Error(Errc::invalid_argument, "truncate: sequence " + text(id.value) + " has " + text(sequence.tokens) +
                                            " tokens, and is to keep " + text(tokens) + "; keep no more than it has");
  if (tokens == sequence.tokens) {
    shrink(sequence, tokens);  // Blocks that a forward has left that failed.
    return trim_prefixes();
  }
  require_windows(id, sequence, tokens, "truncate");
  drop_look(sequence);
  take_back_choices(sequence, tokens);
  shrink(sequence, tokens);
  sequence.tokens = sequence.planned = tokens;
  if (tokens == 0) sequence.first_kept = 0;
  sequence.tail.end = std::min(sequence.tail.end, tokens);
  sequence.prompt_end = std::min(sequence.prompt_end, tokens);
  sequence.clusters.truncate(tokens);
  forget_names(sequence, tokens);
  trim_prefixes();
}

void Engine::Impl::end(SequenceId id) {
  if (imports(id)) take_back(importing);
  Sequence& sequence = resting(id, "end");
  drop_look(sequence);
  if (sequence.policy) {
    const auto rest = runtime::SequencePolicy::rest(sequence.policy, options.timeout);
    sequence.drop_policy();
  }
  remove(id);
}

void Engine::Impl::remove(SequenceId id) noexcept {
  const auto found = sequences.find(id.value);
  Sequence& sequence = found->second;
  if (sequence.tail.slot != kNone) free_tails.push_back(sequence.tail.slot);
  if (sequence.clusters.slot != kNone) free_clusters.push_back(sequence.clusters.slot);
  shrink(sequence, 0);
  trim_prefixes();
  free_lists.push_back(sequence.pages().slot());  // Has had room since the engine was built.
  sequences.erase(found);
}

}  // namespace sluice
