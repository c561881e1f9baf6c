#include "tools/cli/link/profile_cache.hpp"

#include <cstdlib>
#include <exception>

#include "sluice/error.hpp"
#include "tools/cli/link/transfer_profile.hpp"

namespace sluice::tools {
namespace {

/// Absolute, as the XDG specification wants it; else as if it were not set.
std::filesystem::path directory_in(const char* variable) {
  const char* const value = std::getenv(variable);
  std::filesystem::path path = value == nullptr ? "" : value;
  return path.is_absolute() ? path : std::filesystem::path();
}

bool is_plain(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' || c == '-';
}

/// Null if there is no file that holds for these facts: it can be measured again. Why a file cannot be used is told.
std::shared_ptr<const TransferProfile> kept(const std::filesystem::path& file, const CudaDeviceFacts& facts,
                                            const std::function<void(const std::string&)>& say) {
  try {
    const MeasuredProfile found = load_measured_profile(file.string());
    return found.facts == facts ? found.profile : nullptr;
  } catch (const Error& error) {
    if (error.code() == Errc::corrupt) say(std::string("the kept profile is replaced: ") + error.what());
    return nullptr;
  } catch (const std::exception& error) {  // such as no memory to read it: no reason to end a program
    say("the kept profile '" + file.string() + "' is replaced: " + error.what());
    return nullptr;
  }
}

void keep(const TransferProfile& profile, const CudaDeviceFacts& facts, const std::filesystem::path& file) {
  std::error_code failure;
  std::filesystem::create_directories(file.parent_path(), failure);
  if (failure)
    throw Error(Errc::io, "cannot make '" + file.parent_path().string() + "': " + failure.message() +
                              "; let XDG_CACHE_HOME name a directory that you may write to");
  // Writing into a pipe would wait for a reader.
  if (std::filesystem::exists(file, failure) && !std::filesystem::is_regular_file(file, failure))
    throw Error(Errc::io,
                "'" + file.string() + "' is no regular file; remove it, or let XDG_CACHE_HOME name another directory");
  save_transfer_profile(profile, facts, file.string());
}

}  // namespace

std::filesystem::path cache_directory() {
  if (const std::filesystem::path cache = directory_in("XDG_CACHE_HOME"); !cache.empty()) return cache / "sluice";
  if (const std::filesystem::path home = directory_in("HOME"); !home.empty()) return home / ".cache" / "sluice";
  return {};
}

std::string profile_file_name(const CudaDeviceFacts& facts) {
  std::string name = facts.name + "_" + facts.pci_bus_id;
  for (char& c : name) c = is_plain(c) ? c : '_';
  return name + ".json";
}

std::shared_ptr<const TransferProfile> cached_profile(const std::filesystem::path& directory,
                                                      const CudaDeviceFacts& facts,
                                                      const std::function<TransferProfile()>& measure,
                                                      const std::function<void(const std::string&)>& say) {
  const std::filesystem::path file = directory / profile_file_name(facts);
  if (!directory.empty()) {
    if (auto profile = kept(file, facts, say)) return profile;
  }
  auto profile = std::make_shared<const TransferProfile>(measure());
  try {
    if (directory.empty())
      throw Error(Errc::io,
                  "neither XDG_CACHE_HOME nor HOME names a directory; set one, or use --transfer-profile FILE");
    keep(*profile, facts, file);
  } catch (const Error& error) {
    say(std::string("warning: the link will be measured again next time: ") + error.what());
  }
  return profile;
}

}  // namespace sluice::tools
