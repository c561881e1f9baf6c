#include "tools/cli/text/progress_bar.hpp"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "tools/cli/text/message.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint64_t kBarWidth = 30;
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kBetweenLines = std::chrono::seconds(10);
constexpr auto kQuietest = std::chrono::minutes(1);

}  // namespace

bool LogPace::due(Clock::time_point now, std::uint64_t done, std::uint64_t total) {
  const Clock::duration since = now - last_;
  const std::uint64_t tenth = 10 * done / total;
  if (since < kBetweenLines || (tenth == tenth_ && since < kQuietest)) return false;
  last_ = now;
  tenth_ = tenth;
  return true;
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), terminal_(::isatty(STDERR_FILENO) == 1), pace_(Clock::now()) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total, const std::string& note) {
  const auto now = Clock::now();
  if (total == 0) return;
  if (!terminal_) {
    const std::string count = std::to_string(done) + "/" + std::to_string(total);
    if (pace_.due(now, done, total)) say(label_ + " " + count + (note.empty() ? "" : " " + note));
    return;
  }
  if (drawn_ && done < total && now - last_ < kRedraw) return;
  last_ = now;
  drawn_ = true;
  std::string bar(kBarWidth, ' ');
  for (std::uint64_t i = 0; i < kBarWidth * done / total; ++i) bar[i] = '#';
  std::fprintf(stderr, "\r\033[K%s [%s] %llu/%llu %s", label_.c_str(), bar.c_str(),
               static_cast<unsigned long long>(done), static_cast<unsigned long long>(total), printable(note).c_str());
  std::fflush(stderr);
}

}  // namespace sluice::tools
