// Whether there is room for what is asked for, and what sequences take of it.
#include <string>

#include "runtime/call.hpp"
#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/parking.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {

std::uint64_t Engine::Impl::policy_share(const PolicySpec& spec, std::uint32_t tokens) const noexcept {
  if (scheduler::chooser(spec) != scheduler::Chooser::cpu) return 0;
  // Policies look one token ahead, and forwards that came to nothing have let them grow by a token each.
  return scheduler::policy_state_bytes(spec, options.shape, tokens + 1 + kMostForwards, options.windows);
}

std::uint64_t Engine::Impl::policy_shares() const noexcept {
  std::uint64_t bytes = 0;
  for (const auto& [id, sequence] : sequences) bytes += policy_share(sequence.spec, sequence.planned);
  return bytes;
}

bool Engine::Impl::has_policy_room(std::uint64_t more) const noexcept {
  return options.policy_bytes == 0 || more == 0 || policy_shares() + more <= options.policy_bytes;
}

void Engine::Impl::require_policy_room(std::uint64_t more) const {
  if (has_policy_room(more)) return;
  const std::uint64_t shares = policy_shares();
  throw Error(Errc::out_of_capacity,
              "policies that choose on the CPU may keep " + std::to_string(options.policy_bytes) +
                  " bytes, of which " + std::to_string(shares) + " are promised, and " + std::to_string(more) +
                  " more are needed; end a sequence with such a policy, raise EngineOptions::policy_bytes, or use a "
                  "policy that keeps nothing, such as `exact | int4 | top_p=0.95 | near=0`");
}

bool Engine::Impl::admits(std::uint32_t tokens, const PolicySpec& policy) const noexcept {
  try {
    sluice::validate(policy);
    require_served(policy);
  } catch (...) {
    return false;  // Memory for the reason may be short, too.
  }
  if (!has_policy_room(policy_share(policy, tokens))) return false;
  if (scheduler::clusters_on_device(policy) && free_clusters.empty()) return false;
  return scheduler::chooser(policy) != scheduler::Chooser::cpu || !free_tails.empty();
}

void Engine::Impl::see_near() {
  // Between forwards nothing changes, whoever asks how often.
  if (memory.largest().near_pages == 0 || near_seen == planned) return;
  near_seen = kUnseen;
  verbs.see_near(memory.largest(), deadline_after(options.timeout));
  if (programs.empty()) near_seen = planned;
}

SequenceMemoryUse Engine::Impl::use_of(const Sequence& sequence) {
  see_near();
  SequenceMemoryUse use{.far_pages = sequence.held_blocks() * memory.block_bytes(),
                        .policy = sequence.policy_bytes(),
                        .names = sequence.names.ids.capacity() * sizeof(std::int32_t)};
  for (const runtime::PageList& list : sequence.lists) {
    for (const std::uint32_t block : list.held()) {
      const std::uint64_t near = memory.near_bytes_in(block);
      use.near_pages += near;
      if (!table.shared(block)) continue;
      use.far_pages_shared += memory.block_bytes();
      use.near_pages_shared += near;
    }
  }
  const AttentionShape& shape = options.shape;
  if (sequence.tail.slot != kNone)
    use.tail = std::uint64_t{sizes.prompt_queries} * shape.layers * shape.q_heads * shape.head_dim * sizeof(float);
  return use;
}

bool Engine::can_admit(std::uint32_t tokens) const noexcept {
  impl_->parking->release_late();
  return !impl_->free_lists.empty() && tokens <= impl_->memory.largest().largest.max_tokens &&
         impl_->memory.stacks().blocks(impl_->pages_of(tokens)) <= impl_->table.free() + impl_->table.idle();
}

bool Engine::can_admit(std::uint32_t tokens, const PolicySpec& policy) const noexcept {
  return can_admit(tokens) && impl_->admits(tokens, policy);
}

SequenceMemoryUse Engine::memory(SequenceId id) const {
  return translated([&] { return impl_->use_of(impl_->at(id)); });
}

}  // namespace sluice
