#include "tools/llama/tasks.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "sluice/error.hpp"
#include "tools/llama/task_writer.hpp"

namespace sluice::tools {
namespace {

using tasks::bury;
using tasks::needle;
using tasks::needles_in;
using tasks::Strings;
using tasks::Writer;

struct KindName {
  TaskKind kind;
  const char* name;
};
constexpr std::array<KindName, 12> kKinds = {{{TaskKind::niah, "niah"},
                                              {TaskKind::niah_long, "niah_long"},
                                              {TaskKind::multikey, "multikey"},
                                              {TaskKind::kv, "kv"},
                                              {TaskKind::track, "track"},
                                              {TaskKind::copy, "copy"},
                                              {TaskKind::multi, "multi"},
                                              {TaskKind::table, "table"},
                                              {TaskKind::near_keys, "near_keys"},
                                              {TaskKind::turns, "turns"},
                                              {TaskKind::count, "count"},
                                              {TaskKind::long_copy, "long_copy"}}};
constexpr auto kKindList = [] {
  std::array<TaskKind, kKinds.size()> kinds{};
  std::ranges::transform(kKinds, kinds.begin(), &KindName::kind);
  return kinds;
}();

constexpr std::uint32_t kMinLength = 512;
constexpr std::size_t kPassagePairs = 16;      ///< of words, in the passage of copy
constexpr std::size_t kLongPassagePairs = 48;  ///< of long_copy, where the text is long enough

Task needles(TaskKind kind, Writer& writer, std::size_t bytes, std::string_view haystack) {
  const std::size_t count = kind == TaskKind::multikey ? needles_in(bytes, 2) : 1;
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
                                   : tasks::needle_question(keys[asked]);
  return {
      .kind = kind, .prompt = bury(writer, pieces, bytes, haystack, question), .answer = " " + values[asked] + "\n"};
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
  return {.kind = TaskKind::kv, .prompt = prompt + "get " + keys[asked] + " ->", .answer = " " + values[asked] + "\n"};
}

Task track(Writer& writer, std::size_t bytes, std::string_view haystack) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  const std::string first = writer.characters(kLetters, 4);
  std::string second = writer.characters(kLetters, 4);
  while (second == first) second = writer.characters(kLetters, 4);
  const std::string value = writer.characters("123456789", 1) + writer.characters("0123456789", 4);
  const Strings pieces = {"\nVAR " + first + " = " + value + "\n", "\nVAR " + second + " = VAR " + first + "\n"};
  return {.kind = TaskKind::track,
          .prompt = bury(writer, pieces, bytes, haystack, "\nVALUE OF VAR " + second + " IS"),
          .answer = " " + value + "\n"};
}

Task write_task(TaskKind kind, Writer& writer, std::size_t bytes, std::string_view haystack) {
  switch (kind) {
    case TaskKind::niah:
    case TaskKind::niah_long:
    case TaskKind::multikey: return needles(kind, writer, bytes, haystack);
    case TaskKind::kv: return pairs(writer, bytes);
    case TaskKind::track: return track(writer, bytes, haystack);
    case TaskKind::copy: return tasks::copy(kind, writer, kPassagePairs, bytes, haystack);
    case TaskKind::multi: return tasks::multi(writer, bytes, haystack);
    case TaskKind::table: return tasks::table(writer, bytes);
    case TaskKind::near_keys: return tasks::near_keys(writer, bytes, haystack);
    case TaskKind::turns: return tasks::turns(writer, bytes, haystack);
    case TaskKind::count: return tasks::count(writer, bytes);
    case TaskKind::long_copy:
      return tasks::copy(kind, writer, std::clamp(bytes / 40, kPassagePairs, kLongPassagePairs), bytes, haystack);
  }
  throw Error(Errc::invalid_argument, "unknown task kind");
}

/// Where the prompt says an answer that it says in one place, without the blank before and the newline behind it.
void locate_evidence(Task& task) {
  if (!task.evidence.empty()) return;
  std::string_view said = task.answer;
  const bool passage = task.kind == TaskKind::copy || task.kind == TaskKind::long_copy;
  if (said.starts_with(' ') && !passage) said.remove_prefix(1);
  if (said.ends_with('\n')) said.remove_suffix(1);
  task.evidence = {tasks::said(task.prompt, said)};
}

/// Where a piece may be put into a text without cutting a sentence or a line: after '.' and a space, or after a
/// newline, at or after `at`; `at` itself if there is none within 200 bytes.
std::size_t boundary(std::string_view text, std::size_t at) {
  for (std::size_t i = std::max<std::size_t>(at, 2); i < std::min(text.size(), at + 200); ++i) {
    if (text[i - 1] == '\n' || (text[i - 1] == ' ' && text[i - 2] == '.')) return i;
  }
  return std::min(at, text.size());
}

}  // namespace

std::string tasks::bury(Writer& writer, const Strings& pieces, std::size_t bytes, std::string_view haystack,
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

std::string tasks::needle(const std::string& key, const std::string& value) {
  return "\nOne of the special magic values for " + key + " is: " + value + ".\n";
}

std::string tasks::needle_question(const std::string& key) {
  return "\nQ: What is the special magic value for " + key + "?\nA:";
}

std::size_t tasks::needles_in(std::size_t bytes, std::size_t least) {
  constexpr std::size_t kSpacing = 600;  // Bytes of filler for each.
  return std::max(bytes / kSpacing, least);
}

Evidence tasks::said(std::string_view prompt, std::string_view what, std::size_t from) {
  const std::size_t begin = prompt.find(what, from);
  return {.begin = begin, .end = begin + what.size()};
}

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
