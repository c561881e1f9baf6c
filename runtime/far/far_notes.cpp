#include "runtime/far/far_notes.hpp"

#include <algorithm>

namespace sluice::runtime {
namespace {

/// Of a forward: a list of 128K far tokens is 32 pieces, and what a forward of one row has in 32 layers fits.
constexpr std::size_t kMostPieces = 16'384;

}  // namespace

FarNotes::FarNotes(const ForwardMemory& memory) {
  if (!memory.largest.trace || memory.largest.decode_rows == 0) return;
  for (Slot& each : slots_) {
    each.pieces.resize(kMostPieces);
    each.answers.resize(memory.shape.layers);
  }
}

void FarNotes::expect(std::uint64_t forward) noexcept {
  Slot& of = slot(forward);
  of.forward = forward;
  of.count.store(0, std::memory_order_relaxed);
  std::ranges::fill(of.answers, FarAnswer{});
}

void FarNotes::add(std::uint64_t forward, const FarPiece& piece) noexcept {
  Slot& of = slot(forward);
  const std::uint64_t at = of.count.fetch_add(1, std::memory_order_relaxed);
  if (at < of.pieces.size()) of.pieces[at] = piece;
}

void FarNotes::answer(std::uint64_t forward, std::uint32_t layer, const FarAnswer& answer) noexcept {
  slot(forward).answers[layer] = answer;
}

FarWork FarNotes::take(std::uint64_t forward) const {
  const Slot& of = slot(forward);
  if (of.forward != forward) return {};
  const std::uint64_t count = of.count.load(std::memory_order_relaxed);
  const std::uint64_t kept = std::min<std::uint64_t>(count, of.pieces.size());
  return {.pieces = {of.pieces.begin(), of.pieces.begin() + static_cast<std::ptrdiff_t>(kept)},
          .answers = of.answers,
          .dropped = count - kept};
}

std::uint64_t FarNotes::bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const Slot& each : slots_)
    bytes += each.pieces.size() * sizeof(FarPiece) + each.answers.size() * sizeof(FarAnswer);
  return bytes;
}

}  // namespace sluice::runtime
