#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/random.hpp"

namespace sluice::test {

/// Longest input that is made: what parsers do with length shows well below, and deep nesting within it.
inline constexpr std::size_t kMaxInput = 1 << 14;

/// Changes one node of the JSON between the first opening and the last closing bracket of `text`: another value, a
/// child less or more, that of another node, one level deeper. What stands around the JSON stays.
/// @return nothing if there is no JSON, or if it is nested too deeply to be walked
[[nodiscard]] std::optional<std::string> mutate_json(std::string_view text, Random& random,
                                                     const std::vector<std::string>& words);

/// Makes inputs from seeds: each is a function of the seed, the number of the case and the corpus alone.
class Mutator {
 public:
  /// @param corpus  at least one
  /// @param words   what the grammar is made of
  Mutator(std::vector<std::string> corpus, std::vector<std::string> words, std::uint64_t seed)
      : corpus_(std::move(corpus)), words_(std::move(words)), seed_(seed) {}

  /// The corpus itself comes first, unchanged.
  [[nodiscard]] std::string make(std::uint64_t number) const;

 private:
  void mutate(std::string& text, Random& random) const;
  void mutate_bytes(std::string& text, Random& random) const;
  void mutate_words(std::string& text, Random& random) const;

  std::vector<std::string> corpus_;
  std::vector<std::string> words_;
  std::uint64_t seed_;
};

}  // namespace sluice::test
