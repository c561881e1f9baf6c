#include "tools/llama/tasks.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <vector>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

constexpr std::array<std::string_view, 40> kAdjectives = {
    "amber",  "bold",  "calm",   "dusty",  "early",  "fancy",   "gentle",  "hidden",   "icy",    "jolly",
    "keen",   "lunar", "misty",  "noble",  "olive",  "proud",   "quiet",   "rusty",    "silver", "tidy",
    "urban",  "vivid", "warm",   "young",  "zesty",  "crimson", "distant", "electric", "frozen", "golden",
    "hollow", "ivory", "lively", "mellow", "narrow", "orange",  "purple",  "rapid",    "silent", "tiny"};
constexpr std::array<std::string_view, 40> kNouns = {
    "otter",  "falcon", "harbor", "canyon", "lantern", "meadow", "pepper",  "rocket", "saddle",  "temple",
    "anchor", "basket", "candle", "dragon", "engine",  "forest", "garden",  "hammer", "island",  "jacket",
    "kettle", "ladder", "magnet", "needle", "orchid",  "pillow", "quarry",  "ribbon", "shadow",  "tunnel",
    "violin", "walnut", "yogurt", "zipper", "beacon",  "cactus", "dolphin", "ember",  "feather", "glacier"};
constexpr std::array<std::string_view, 5> kSentences = {
    "The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back again. "};

struct KindName {
  TaskKind kind;
  const char* name;
};
constexpr std::array<KindName, 6> kKinds = {{{TaskKind::niah, "niah"},
                                             {TaskKind::niah_long, "niah_long"},
                                             {TaskKind::multikey, "multikey"},
                                             {TaskKind::kv, "kv"},
                                             {TaskKind::track, "track"},
                                             {TaskKind::copy, "copy"}}};
constexpr std::array<TaskKind, 6> kKindList = {TaskKind::niah, TaskKind::niah_long, TaskKind::multikey,
                                               TaskKind::kv,   TaskKind::track,     TaskKind::copy};

constexpr std::uint32_t kMinLength = 512;
constexpr std::size_t kNeedleSpacing = 600;  ///< bytes of filler per needle in multikey
constexpr std::size_t kPassageWords = 16;    ///< word pairs in the passage of copy
constexpr std::size_t kCueWords = 4;         ///< of which the question gives away these

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

/// Where a piece may be put into a text without cutting a sentence or a line: after '.' and a space, or after a
/// newline, at or after `at`; `at` itself if there is none within 200 bytes.
std::size_t boundary(std::string_view text, std::size_t at) {
  for (std::size_t i = std::max<std::size_t>(at, 2); i < std::min(text.size(), at + 200); ++i) {
    if (text[i - 1] == '\n' || (text[i - 1] == ' ' && text[i - 2] == '.')) return i;
  }
  return std::min(at, text.size());
}

/// Puts the pieces into the filler in the given order, the i-th somewhere in the i-th equal part of it, and the
/// question at the end.
std::string bury(Writer& writer, const Strings& pieces, std::size_t bytes, std::string_view haystack,
                 const std::string& question) {
  std::size_t taken = question.size();
  for (const std::string& piece : pieces) taken += piece.size();
  const std::string filler = writer.filler(bytes - taken, haystack);
  const std::size_t part = filler.size() / pieces.size();
  std::string text;
  std::size_t done = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::size_t at = std::max(done, boundary(filler, i * part + writer.below(part)));
    text.append(filler, done, at - done).append(pieces[i]);
    done = at;
  }
  return text.append(filler, done).append(question);
}

std::string needle(const std::string& key, const std::string& value) {
  return "\nOne of the special magic values for " + key + " is: " + value + ".\n";
}

Task needles(TaskKind kind, Writer& writer, std::size_t bytes, std::string_view haystack) {
  const std::size_t count = kind == TaskKind::multikey ? std::max<std::size_t>(bytes / kNeedleSpacing, 2) : 1;
  Strings keys;
  Strings values;
  Strings pieces;
  for (std::size_t i = 0; i < count; ++i) {
    keys.push_back(writer.needle_key());
    values.push_back(writer.value());
    pieces.push_back(needle(keys.back(), values.back()));
  }
  const std::size_t asked = writer.below(count);
  const std::string question = kind == TaskKind::niah_long
                                   ? "\nWhat is the special magic value for " + keys[asked] +
                                         " mentioned in the text? The special magic value for " + keys[asked] + " is"
                                   : "\nQ: What is the special magic value for " + keys[asked] + "?\nA:";
  return {kind, bury(writer, pieces, bytes, haystack, question), " " + values[asked] + "\n"};
}

Task pairs(Writer& writer, std::size_t bytes) {
  Strings keys;
  Strings values;
  Strings lines;
  std::size_t used = 0;
  while (true) {
    std::string key = writer.pair_key();
    std::string value = writer.value();
    std::string line = "set " + key + " = " + value + "\n";
    // The longest key may be the one that is asked for.
    const std::size_t question = std::string_view("get  ->").size() + 16;
    if (used + line.size() + question > bytes) break;
    used += line.size();
    keys.push_back(std::move(key));
    values.push_back(std::move(value));
    lines.push_back(std::move(line));
  }
  const std::size_t asked = writer.below(keys.size());
  std::string prompt;
  for (const std::string& line : lines) prompt += line;
  return {TaskKind::kv, prompt + "get " + keys[asked] + " ->", " " + values[asked] + "\n"};
}

Task track(Writer& writer, std::size_t bytes, std::string_view haystack) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  const std::string first = writer.characters(kLetters, 4);
  std::string second = writer.characters(kLetters, 4);
  while (second == first) second = writer.characters(kLetters, 4);
  const std::string value = writer.characters("123456789", 1) + writer.characters("0123456789", 4);
  const Strings pieces = {"\nVAR " + first + " = " + value + "\n", "\nVAR " + second + " = VAR " + first + "\n"};
  return {TaskKind::track, bury(writer, pieces, bytes, haystack, "\nVALUE OF VAR " + second + " IS"),
          " " + value + "\n"};
}

Task copy(Writer& writer, std::size_t bytes, std::string_view haystack) {
  std::string cue;
  std::string rest;
  for (std::size_t i = 0; i < kPassageWords; ++i) {
    std::string& part = i < kCueWords ? cue : rest;
    if (i > 0) part += " ";
    part += writer.adjective_noun();
  }
  rest += "\n";
  return {TaskKind::copy, bury(writer, {"\n" + cue + rest}, bytes, haystack, "\nREPEAT:\n" + cue), rest};
}

Task write_task(TaskKind kind, Writer& writer, std::size_t bytes, std::string_view haystack) {
  switch (kind) {
    case TaskKind::niah:
    case TaskKind::niah_long:
    case TaskKind::multikey: return needles(kind, writer, bytes, haystack);
    case TaskKind::kv: return pairs(writer, bytes);
    case TaskKind::track: return track(writer, bytes, haystack);
    case TaskKind::copy: return copy(writer, bytes, haystack);
  }
  throw Error(Errc::invalid_argument, "unknown task kind");
}

/// Where the prompt says the answer, without the blank before and the newline behind it.
void locate_evidence(Task& task) {
  std::string_view said = task.answer;
  if (said.starts_with(' ') && task.kind != TaskKind::copy) said.remove_prefix(1);
  if (said.ends_with('\n')) said.remove_suffix(1);
  task.evidence_begin = task.prompt.find(said);
  task.evidence_end = task.evidence_begin + said.size();
}

}  // namespace

const char* to_string(TaskKind kind) noexcept {
  for (const KindName& entry : kKinds) {
    if (entry.kind == kind) return entry.name;
  }
  return "unknown";
}

TaskKind parse_task_kind(std::string_view text) {
  std::string names;
  for (const KindName& entry : kKinds) {
    if (entry.name == text) return entry.kind;
    names.append(names.empty() ? "" : ", ").append(entry.name);
  }
  throw Error(Errc::invalid_argument, "no task '" + std::string(text) + "'; there are " + names);
}

std::span<const TaskKind> task_kinds() noexcept { return kKindList; }

Task make_task(TaskKind kind, std::uint32_t length_tokens, std::uint64_t seed, std::string_view haystack) {
  if (length_tokens < kMinLength) {
    throw Error(Errc::invalid_argument, "a task takes at least " + std::to_string(kMinLength) + " tokens, not " +
                                            std::to_string(length_tokens));
  }
  Writer writer(seed);
  const std::size_t bytes = length_tokens - 1;  // BOS is a token too
  Task task = write_task(kind, writer, bytes, haystack);
  locate_evidence(task);
  return task;
}

bool solved(const Task& task, std::string_view output) noexcept { return output.starts_with(task.answer); }

}  // namespace sluice::tools
