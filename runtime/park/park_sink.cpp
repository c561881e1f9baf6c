#include "runtime/park/park_sink.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

/// With the slash behind it.
std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "./" : path.substr(0, slash + 1);
}

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

FileSink::FileSink(const std::string& path) : path_(path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) {
    if (!S_ISREG(status.st_mode))
      throw Error(Errc::invalid_argument,
                  path + " is there and no ordinary file; give the parked sequence another name");
  } else if (errno != ENOENT || path.empty()) {
    refuse("look for it");
  }
  const std::string directory = directory_of(path);
  directory_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory_ < 0) refuse("open its directory");
  temporary_ = directory + ".sluice-XXXXXX";  // No longer than a name may be, however long the other is.
  descriptor_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (descriptor_ >= 0) return;
  temporary_.clear();
  const int error = errno;
  (void)::close(directory_);
  errno = error;
  refuse("create a file beside it");
}

FileSink::~FileSink() {
  if (directory_ >= 0) (void)::close(directory_);
  if (descriptor_ >= 0) (void)::close(descriptor_);
  if (!temporary_.empty()) (void)::unlink(temporary_.c_str());
}

std::span<std::byte> FileSink::room(std::uint64_t, std::uint64_t count, std::vector<std::byte>& scratch) {
  if (scratch.size() < count) scratch.resize(count);
  return std::span(scratch).first(count);
}

void FileSink::put(std::uint64_t at, std::span<const std::byte> bytes) {
  for (std::uint64_t done = 0; done < bytes.size();) {
    const ssize_t put = ::pwrite(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(at + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) refuse("write it");
    done += static_cast<std::uint64_t>(put);
  }
#if defined(__linux__)
  // The disk begins now, not when all is written and waited for. Advice: where it cannot, the wait takes longer.
  (void)::sync_file_range(descriptor_, static_cast<off_t>(at), static_cast<off_t>(bytes.size()), SYNC_FILE_RANGE_WRITE);
#endif
}

void FileSink::finish() {
  if (::fsync(descriptor_) != 0) refuse("bring it to the disk");
  if (::close(std::exchange(descriptor_, -1)) != 0) refuse("close it");
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) refuse("give it its name");
  temporary_.clear();
  keep_name();
}

/// Its name is on the disk with the directory. Some file systems have nothing to bring there, and say so.
void FileSink::keep_name() {
  if (::fsync(directory_) == 0 || errno == EINVAL || errno == ENOTSUP) return;
  throw Error(Errc::io, "the sequence is parked in " + path_ + ", but may not survive a power cut: cannot bring the " +
                            "directory to the disk: " + reason(errno) + "; park it again where that can be done");
}

void FileSink::refuse(const char* what) const {
  throw Error(Errc::io, "cannot park in " + path_ + ": cannot " + what + ": " + reason(errno) +
                            "; a file that was there before is there as it was");
}

}  // namespace sluice::runtime
