#pragma once

#include <cstdint>

#include "sluice/forward_memory.hpp"

/// Lists' far parts as a device may read them without having been told that they are there, see FarUnit.
namespace sluice::runtime {

/// Whether this CPU stores all of a unit at once. Nothing is published by one that does not.
[[nodiscard]] bool stores_units() noexcept;

/// Units that there is to be room for; 0: nothing is published.
[[nodiscard]] std::uint64_t unit_room(const ForwardMemory& memory) noexcept;

/// Publishes a list's far part, which is complete, as of question `asked`. `memory`: as the list's rows see it. Before
/// the list is finished: what says that the question is answered comes behind it.
void publish(const ForwardMemory& memory, std::uint64_t asked, std::uint32_t list) noexcept;

/// All units are of question `asked` from now on, so that none is left of those whose numbers will come again. Of it
/// itself nothing changes: what it has published says so already, and nobody reads what it has not. Behind all that it
/// publishes, before it is answered.
void renew_tags(const ForwardMemory& memory, std::uint64_t asked) noexcept;

}  // namespace sluice::runtime
