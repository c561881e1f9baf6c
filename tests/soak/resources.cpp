#include "tests/soak/resources.hpp"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace sluice::test {

Resources current_resources() {
  Resources now;
#ifdef __GLIBC__
  malloc_trim(0);
  const auto heap = mallinfo2();
  now.allocated_bytes = heap.uordblks + heap.hblkhd;
#endif
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    if (key == "VmRSS:" && status >> now.resident_bytes) now.resident_bytes *= 1024;
    if (key == "Threads:") status >> now.threads;
    status.ignore(4096, '\n');
  }
  if (now.threads == 0) throw std::runtime_error("/proc/self/status says nothing of memory and threads");
  const std::filesystem::directory_iterator files("/proc/self/fd");
  // The iterator has one of them open.
  now.descriptors = static_cast<std::uint64_t>(std::distance(files, {})) - 1;
  return now;
}

double median_of_third(const std::vector<double>& values, int third) {
  const std::size_t begin = values.size() * static_cast<std::size_t>(third) / 3;
  const std::size_t end = values.size() * static_cast<std::size_t>(third + 1) / 3;
  std::vector<double> part(values.begin() + static_cast<std::ptrdiff_t>(begin),
                           values.begin() + static_cast<std::ptrdiff_t>(end));
  const auto middle = part.begin() + static_cast<std::ptrdiff_t>(part.size() / 2);
  std::nth_element(part.begin(), middle, part.end());
  return *middle;
}

std::string growth(const std::string& what, const std::vector<double>& values, const Bound& bound) {
  if (values.size() < 3) return {};
  const double first = median_of_third(values, 0);
  const double last = median_of_third(values, 2);
  if (last <= bound.factor * first + bound.slack) return {};
  std::ostringstream text;
  text << what << " grew from " << first << " to " << last << " (medians of the first and last third of "
       << values.size() << ")";
  return text.str();
}

}  // namespace sluice::test
