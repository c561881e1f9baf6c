#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tools/llama/tasks.hpp"

/// What the tasks are written with, and those that have files of their own.
namespace sluice::tools::tasks {

inline constexpr std::array<std::string_view, 40> kAdjectives = {
    "amber",  "bold",  "calm",   "dusty",  "early",  "fancy",   "gentle",  "hidden",   "icy",    "jolly",
    "keen",   "lunar", "misty",  "noble",  "olive",  "proud",   "quiet",   "rusty",    "silver", "tidy",
    "urban",  "vivid", "warm",   "young",  "zesty",  "crimson", "distant", "electric", "frozen", "golden",
    "hollow", "ivory", "lively", "mellow", "narrow", "orange",  "purple",  "rapid",    "silent", "tiny"};
inline constexpr std::array<std::string_view, 40> kNouns = {
    "otter",  "falcon", "harbor", "canyon", "lantern", "meadow", "pepper",  "rocket", "saddle",  "temple",
    "anchor", "basket", "candle", "dragon", "engine",  "forest", "garden",  "hammer", "island",  "jacket",
    "kettle", "ladder", "magnet", "needle", "orchid",  "pillow", "quarry",  "ribbon", "shadow",  "tunnel",
    "violin", "walnut", "yogurt", "zipper", "beacon",  "cactus", "dolphin", "ember",  "feather", "glacier"};
inline constexpr std::array<std::string_view, 5> kSentences = {
    "The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back again. "};

using Strings = std::vector<std::string>;

/// Random texts of the tasks. Only the generator's raw bits are used: the standard's distributions differ
/// between libraries.
class Writer {
 public:
  explicit Writer(std::uint64_t seed) : random_(seed) {}

  /// Uniform in [0, count), up to a bias of count / 2^64.
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

  std::string adjective_noun() {
    std::string text(kAdjectives[below(kAdjectives.size())]);
    return text.append("-").append(kNouns[below(kNouns.size())]);
  }

  std::string characters(std::string_view alphabet, std::size_t count) {
    std::string text;
    while (text.size() < count) text.push_back(alphabet[below(alphabet.size())]);
    return text;
  }

  /// 7 digits, adjective-noun or 8 hex digits.
  std::string value() {
    switch (below(3)) {
      case 0: return characters("123456789", 1) + characters("0123456789", 6);
      case 1: return adjective_noun();
      default: return characters("0123456789abcdef", 8);
    }
  }

  /// A needle's key: adjective-noun, half of them with -NN. No key of one writer begins another.
  std::string needle_key() {
    const std::string base =
        unused([&] { return adjective_noun(); }, [&] { return characters("abcdefghijklmnop", 12); });
    return below(2) == 0 ? base : base + "-" + characters("123456789", 1) + characters("0123456789", 1);
  }

  /// A pair's key: 6 hex digits or adjective-noun, unique within one writer.
  std::string pair_key() {
    const auto hex = [&] { return characters("0123456789abcdef", 6); };
    return below(2) == 0 ? unused(hex, hex) : unused([&] { return adjective_noun(); }, hex);
  }

  /// A record's owner: 5 letters, unique within one writer.
  std::string owner() {
    const auto letters = [&] { return characters("abcdefghijklmnopqrstuvwxyz", 5); };
    return unused(letters, letters);
  }

  /// Exactly `bytes` of filler.
  std::string filler(std::size_t bytes, std::string_view haystack) {
    std::string text;
    if (haystack.empty()) {
      while (text.size() < bytes) text.append(kSentences[below(kSentences.size())]);
    } else {
      std::size_t at = below(haystack.size());
      for (; text.size() < bytes; at = 0) text.append(haystack.substr(at));
    }
    text.resize(bytes);
    return text;
  }

 private:
  /// Draws until the text is new; after some misses, which a nearly exhausted word list gives, from `spare`.
  template <class Draw, class Spare>
  std::string unused(const Draw& draw, const Spare& spare) {
    for (int attempt = 0;; ++attempt) {
      std::string text = attempt < 32 ? draw() : spare();
      if (used_.insert(text).second) return text;
    }
  }

  std::mt19937_64 random_;
  std::set<std::string> used_;
};

/// Puts the pieces into the filler in the given order, the i-th somewhere in the i-th equal part of it, and the
/// question at the end.
std::string bury(Writer& writer, const Strings& pieces, std::size_t bytes, std::string_view haystack,
                 const std::string& question);
std::string needle(const std::string& key, const std::string& value);
/// Needles that a text of so many bytes has, where it has many.
std::size_t needles_in(std::size_t bytes, std::size_t least);

/// Tasks whose answers are put together from several places.
Task multi(Writer& writer, std::size_t bytes, std::string_view haystack);
Task table(Writer& writer, std::size_t bytes);
Task count(Writer& writer, std::size_t bytes);
/// Tasks in which much looks like the answer's place, or much is between.
Task near_keys(Writer& writer, std::size_t bytes, std::string_view haystack);
Task turns(Writer& writer, std::size_t bytes, std::string_view haystack);
/// A passage of so many pairs of words; `kind` is copy or long_copy.
Task copy(TaskKind kind, Writer& writer, std::size_t pairs, std::size_t bytes, std::string_view haystack);

/// What a needle is asked for with.
std::string needle_question(const std::string& key);

/// The first place where a prompt says this.
Evidence said(std::string_view prompt, std::string_view what, std::size_t from = 0);

}  // namespace sluice::tools::tasks
