#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/llama/config.hpp"

namespace sluice::tools {

/// A prompt with one right answer. Files of them are those of `python -m sluice eval --tasks`: a JSON object on each
/// line, {"task": name, "length": tokens, "prompt": ..., "answer": ...}, where prompt and answer are lists of token
/// ids, or texts if the model's tokens are bytes; task and length may be left out.
struct Task {
  std::size_t line = 0;  ///< of the file, from 1
  std::string name{};
  std::uint32_t length = 0;   ///< that the file says, or the prompt's rounded up to a power of two
  std::vector<int> prompt{};  ///< token ids, of a text with BOS in front
  std::vector<int> answer{};  ///< token ids, without BOS
  bool text = false;          ///< the answer is judged as text, without the white space around it
};

/// @throws Error{Errc::corrupt} naming file and line of what is no task; Error{Errc::invalid_argument} of tokens that
/// are none of the model's, and texts where the model's tokens are no bytes; else as read_text_file.
[[nodiscard]] std::vector<Task> read_tasks(const std::string& path, const ModelConfig& config);

/// Tokens of an answer, at most: `max_tokens`, or for 0 what the right one takes, of a text 8 more.
[[nodiscard]] std::uint32_t answer_limit(const Task& task, std::uint32_t max_tokens) noexcept;

/// Whether greedy output begins with the right answer.
[[nodiscard]] bool is_right(const Task& task, std::span<const int> output);

}  // namespace sluice::tools
