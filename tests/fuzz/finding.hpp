#pragma once

#include <string>
#include <string_view>

namespace sluice::test {

/// Writes the input that is running to a file if the process dies of it: by a signal, by abort, by a sanitizer, or by
/// 60 s of processor time. One at a time per process.
class FindingWriter {
 public:
  /// Installs handlers that stay until the process ends.
  FindingWriter();
  /// @param file  where the input goes if it is a finding. Both must stay until the next call.
  void run(std::string_view input, const std::string& file);
};

}  // namespace sluice::test
