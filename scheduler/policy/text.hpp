#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// Whether tokens are scored and cut to a budget.
[[nodiscard]] inline bool chooses(const PolicySpec& spec) noexcept {
  return spec.sources != 0 && !spec.uses(Source::all);
}

/// One word of a policy and where it came from, so that every complaint can point at it.
struct Word {
  std::string_view text;   ///< the whole policy
  std::string_view value;  ///< inside `text`, no blanks around it

  [[noreturn]] void fail(const std::string& why) const;
  /// The same policy, another word of it.
  [[nodiscard]] Word part(std::string_view piece) const noexcept;
};

/// Words between separators, at the level of no parentheses. An empty text is one empty word.
[[nodiscard]] std::vector<Word> split(const Word& word, char separator);
/// The word before and after the first `separator`; the second has no text if there is none.
struct Halves {
  Word first, second;
  bool both = false;
};
[[nodiscard]] Halves halve(const Word& word, char separator);

/// Numbers as scheduler/numbers.hpp reads them: 64, 8K.
[[nodiscard]] std::uint32_t read_count(const Word& word);
[[nodiscard]] std::uint64_t read_seed(const Word& word);
[[nodiscard]] float read_number(const Word& word);
/// 2% or 0.02.
[[nodiscard]] float read_share(const Word& word);
[[nodiscard]] bool read_switch(const Word& word);

/// `COUNT`, `SHARE`, `all` or `max(COUNT, SHARE)`. A count alone is fixed; a share alone keeps the floor that is there.
/// A share is told by its % or its point.
void read_larger_of(const Word& word, std::uint32_t& count, float& share);

/// Where a key belongs: to a source, to a stage, or only to the flat list behind a preset's name.
enum class Room : std::uint8_t {
  history,
  pages,
  clusters,
  lsh,
  snapshot,
  labels,
  top_k,
  progressive,
  verified,
  within,
  drawn,
  skewed,
  bypass,
  near,
  dense,
  flat
};

/// One `key=value`.
struct Key {
  std::string_view name;
  Room room;
  void (*apply)(PolicySpec&, const Word&);
};

/// Applies `options`, a comma list of key=value of one room.
void apply_options(const Word& options, Room room, PolicySpec& spec);
/// Applies the comma list behind a preset's name, where keys of all rooms may stand that the preset reads.
void apply_flat_options(const Word& options, PolicySpec& spec);

void read_digest(const Word& word, PageSourceOptions& pages);

/// The same policy, with the defaults where it says what none of its stages reads.
[[nodiscard]] PolicySpec what_is_read(const PolicySpec& spec);

/// Shortest form that a reader would write: 0.2, 10, 1e-06.
[[nodiscard]] std::string number(double value);
[[nodiscard]] std::string percent(double share);

}  // namespace sluice::scheduler
