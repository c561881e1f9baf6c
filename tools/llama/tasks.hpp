#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::tools {

/// Synthetic long-context tasks: those that the testbed model was trained on (tests/data/testbed/README.md), and harder
/// ones, of which near_keys and turns need no other model. tools/lab/train trains one on all of them.
enum class TaskKind : std::uint8_t {
  niah,       ///< one needle in filler text
  niah_long,  ///< the same, asked in a full sentence
  multikey,   ///< a needle every 600 bytes, all keys different; one is asked for
  kv,         ///< nothing but key-value pairs; one is asked for
  track,      ///< a variable assigned from another variable
  copy,       ///< repeat a passage from its beginning
  multi,      ///< needles, some keys with several values: all of one key are asked for, or those of three keys
  table,      ///< nothing but records; one is asked for by its owner, or the codes of all of a city
  near_keys,  ///< needles whose keys differ from the one that is asked for in a word or a digit
  turns,      ///< needles, and several questions with their answers before the one that counts
  count,      ///< nothing but records; how many are of a city
  long_copy,  ///< repeat a passage of up to 800 bytes from its beginning
};

[[nodiscard]] const char* to_string(TaskKind kind) noexcept;
/// @throws Error{Errc::invalid_argument} that lists the kinds.
[[nodiscard]] TaskKind parse_task_kind(std::string_view text);
/// All kinds, in the order in which tables list them.
[[nodiscard]] std::span<const TaskKind> task_kinds() noexcept;

/// Bytes [begin, end) of a prompt.
struct Evidence {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// A prompt with one right answer. Judged by exact match of the greedy output: see `solved`.
struct Task {
  TaskKind kind{};
  std::string prompt;  ///< bytes, the question at the end; BOS not included
  std::string answer;  ///< what follows, with its leading space and final newline (copy: the passage's rest)
  /// What of the prompt says the answer, in the answer's order: what attention has to find.
  std::vector<Evidence> evidence{};
};

/// Builds a task, the same one for the same arguments on every platform.
/// @param length_tokens  of the prompt with BOS, one token per byte. Met exactly; kv, table and count may stay up to 70
///                       below, as they consist of whole lines. At least 512.
/// @param haystack       filler text, read from a random place and wrapped around; empty: the testbed's five
///                       sentences in random order
/// @throws Error{Errc::invalid_argument} for a shorter length.
[[nodiscard]] Task make_task(TaskKind kind, std::uint32_t length_tokens, std::uint64_t seed,
                             std::string_view haystack = {});

/// Whether greedy output answers the task: it begins with the expected answer.
[[nodiscard]] bool solved(const Task& task, std::string_view output) noexcept;

}  // namespace sluice::tools
