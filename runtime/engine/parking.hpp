#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/background/borrowing_job.hpp"
#include "runtime/background/side_data.hpp"
#include "runtime/engine/impl.hpp"
#include "runtime/park/park_body.hpp"
#include "runtime/park/park_head.hpp"
#include "runtime/park/park_sink.hpp"
#include "runtime/park/park_source.hpp"

namespace sluice {

/// Sequences of an engine that leave it for a file or memory of the caller, and come back.
class Engine::Impl::Parking {
 public:
  explicit Parking(Impl& whole) noexcept : engine_(whole) {}

  // As Engine's.
  [[nodiscard]] std::uint64_t park_bytes(SequenceId id, std::string_view model);
  std::uint64_t park(SequenceId id, std::span<std::byte> area, std::string_view model);
  void park(SequenceId id, const std::string& file, std::string_view model);
  [[nodiscard]] SequenceId resume(runtime::ParkSource& source, std::string_view model);

  /// Lets go of blocks that a device was late with, once it is through with them.
  void release_late() noexcept;

 private:
  [[nodiscard]] runtime::ParkHead head_of(SequenceId id, std::string_view model);
  void write(SequenceId id, const runtime::ParkHead& head, runtime::ParkSink& sink);
  struct Body {
    runtime::ParkBody body;
    std::vector<std::uint64_t> plane_ends;  ///< [layers, kv_heads] where what is loaded of one ends
  };
  /// Where the body of a sequence lies, or is to, with its first `names` names there.
  [[nodiscard]] Body body_of(Sequence& sequence, const runtime::ParkHead& head, std::span<std::int32_t> names);
  /// Copies a block of a body; with scratch memory of the thread.
  using BlockWork = std::function<void(std::uint64_t block, std::vector<std::byte>& scratch)>;
  /// Threads begin to do blocks [first, last).
  [[nodiscard]] std::unique_ptr<runtime::BorrowingJob> begin_blocks(std::uint64_t first, std::uint64_t last,
                                                                    BlockWork work);
  /// @throws Error{Errc::timeout}, or what a block has thrown
  void await_blocks(runtime::BorrowingJob& job, const char* call);

  /// Gives a sequence that was added all that was parked. If it throws, it may have some of it.
  void load(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence);
  void load_body(runtime::ParkSource& source, const runtime::ParkHead& head, Sequence& sequence,
                 std::span<std::int32_t> names);
  /// Reads all of the body.  @throws Error{Errc::corrupt} if it is damaged
  void require_whole(runtime::ParkSource& source, const runtime::ParkHead& head);
  /// What Impl::copies lists is done without a plan: one that could not be enqueued has left it, and its blocks may be
  /// free or belong to other sequences meanwhile.
  void finish_copies();
  void let_go(std::vector<std::uint32_t>& blocks) noexcept;
  /// All blocks of a sequence, which has none then; their reference counts stay as they are.
  [[nodiscard]] std::vector<std::uint32_t> give_up(Sequence& sequence) noexcept;

  Impl& engine_;
  std::unique_ptr<runtime::SideData> side_data_;  ///< null as long as no sequence was resumed
  /// What a device was too late with, which goes on with what it was given, and the blocks that it is for.
  struct LateSideData {
    std::unique_ptr<runtime::SideData> made;
    std::vector<std::uint32_t> blocks, copies;
  };
  std::vector<LateSideData> late_side_data_;
  std::vector<std::uint32_t> given_up_;     ///< with room for what is loaded
  std::vector<std::uint32_t> side_copies_;  ///< blocks of others that side_data_ works for, held as long
};

}  // namespace sluice
