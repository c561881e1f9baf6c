#include "runtime/park/park_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

[[noreturn]] void refuse(const std::string& path, int error) {
  throw Error(error == ENOENT ? Errc::not_found : Errc::io,
              "cannot read " + path + ": " + std::generic_category().message(error) +
                  "; give it a file that a sequence was parked in and that this process may read");
}

}  // namespace

FileSource::FileSource(const std::string& path) : path_(path) {
  // A pipe that nobody writes to would keep the caller waiting.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) refuse(path, errno);
  struct stat status {};
  const int error = ::fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (error == 0 && S_ISREG(status.st_mode)) {
    bytes_ = static_cast<std::uint64_t>(status.st_size);
    (void)::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_SEQUENTIAL);  // Advice: it may be ignored.
    return;
  }
  (void)::close(descriptor_);
  if (error != 0) refuse(path, error);
  throw Error(Errc::invalid_argument, path + " is no ordinary file; give it one that a sequence was parked in");
}

FileSource::~FileSource() { (void)::close(descriptor_); }

std::span<const std::byte> FileSource::read(std::uint64_t at, std::uint64_t count, std::vector<std::byte>& scratch) {
  if (scratch.size() < count) scratch.resize(count);
  for (std::uint64_t done = 0; done < count;) {
    const ssize_t got = ::pread(descriptor_, scratch.data() + done, count - done, static_cast<off_t>(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path_, errno);
    if (got == 0) throw Error(Errc::corrupt, path_ + " became shorter while it was read; take another copy of it");
    done += static_cast<std::uint64_t>(got);
  }
  return std::span(scratch).first(count);
}

}  // namespace sluice::runtime
