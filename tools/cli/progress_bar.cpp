#include "tools/cli/progress_bar.hpp"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace sluice::tools {
namespace {

constexpr std::uint64_t kBarWidth = 30;
constexpr auto kRedraw = std::chrono::milliseconds(100);

}  // namespace

ProgressBar::ProgressBar(std::string label) : label_(std::move(label)), terminal_(::isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total, const std::string& note) {
  const auto now = Clock::now();
  if (!terminal_ || total == 0 || (drawn_ && done < total && now - last_ < kRedraw)) return;
  last_ = now;
  drawn_ = true;
  std::string bar(kBarWidth, ' ');
  for (std::uint64_t i = 0; i < kBarWidth * done / total; ++i) bar[i] = '#';
  std::fprintf(stderr, "\r\033[K%s [%s] %llu/%llu %s", label_.c_str(), bar.c_str(),
               static_cast<unsigned long long>(done), static_cast<unsigned long long>(total), note.c_str());
  std::fflush(stderr);
}

}  // namespace sluice::tools
