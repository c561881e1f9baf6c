#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace sluice::tools {

/// The synthetic long-context tasks that the testbed model was trained on (tests/data/testbed/README.md).
enum class TaskKind : std::uint8_t {
  niah,       ///< one needle in filler text
  niah_long,  ///< the same, asked in a full sentence
  multikey,   ///< a needle every 600 bytes, all keys different; one is asked for
  kv,         ///< nothing but key-value pairs; one is asked for
  track,      ///< a variable assigned from another variable
  copy,       ///< repeat a passage from its beginning
};

[[nodiscard]] const char* to_string(TaskKind kind) noexcept;
/// @throws Error{Errc::invalid_argument} that lists the kinds.
[[nodiscard]] TaskKind parse_task_kind(std::string_view text);
/// All kinds, in the order in which tables list them.
[[nodiscard]] std::span<const TaskKind> task_kinds() noexcept;

/// A prompt with one right answer. Judged by exact match of the greedy output: see `solved`.
struct Task {
  TaskKind kind{};
  std::string prompt;  ///< bytes, the question at the end; BOS not included
  std::string answer;  ///< what follows, with its leading space and final newline (copy: the passage's rest)
  /// Bytes [evidence_begin, evidence_end) of the prompt say the answer: what attention has to find.
  std::size_t evidence_begin = 0;
  std::size_t evidence_end = 0;
};

/// Builds a task, the same one for the same arguments on every platform.
/// @param length_tokens  of the prompt with BOS, one token per byte. Met exactly; kv may stay up to 40 below, since it
///                       consists of whole lines. At least 512.
/// @param haystack       filler text, read from a random place and wrapped around; empty: the testbed's five
///                       sentences in random order
/// @throws Error{Errc::invalid_argument} for a shorter length.
[[nodiscard]] Task make_task(TaskKind kind, std::uint32_t length_tokens, std::uint64_t seed,
                             std::string_view haystack = {});

/// Whether greedy output answers the task: it begins with the expected answer.
[[nodiscard]] bool solved(const Task& task, std::string_view output) noexcept;

}  // namespace sluice::tools
