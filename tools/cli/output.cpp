#include "tools/cli/output.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& action) {
  throw Error(Errc::io, "cannot " + action + " '" + path + "': " + std::strerror(errno) +
                            "; choose a path in an existing directory that you may write to");
}

/// A file that is unlinked again unless it was renamed into place.
class TemporaryFile {
 public:
  TemporaryFile(std::string path, const std::string& target) : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0) refuse(target, "write");
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!kept_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  void rename_to(const std::string& target) {
    if (::fsync(fd_) != 0) refuse(target, "write");
    const int closed = ::close(std::exchange(fd_, -1));
    if (closed != 0 || std::rename(path_.c_str(), target.c_str()) != 0) refuse(target, "write");
    kept_ = true;
  }

 private:
  std::string path_;
  int fd_ = -1;
  bool kept_ = false;
};

/// Of its own even where every process has the same number, as in containers, and an earlier one was killed.
std::string temporary_name(const std::string& path) {
  return path + ".tmp" + std::to_string(::getpid()) + "-" + std::to_string(std::random_device()());
}

void write_all(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse(path, "write");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

OutputTarget::OutputTarget(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0) {
    replace_ = S_ISREG(status.st_mode);
    if (S_ISDIR(status.st_mode)) {
      errno = EISDIR;
      refuse(path_, "write");
    }
    if (::access(path_.c_str(), W_OK) != 0) refuse(path_, "write");
  }
  if (replace_) TemporaryFile(temporary_name(path_), path_);
}

void OutputTarget::commit(std::string_view text) const {
  if (path_.empty()) return write_stdout(text);
  if (replace_) {
    TemporaryFile file(temporary_name(path_), path_);
    write_all(file.fd(), text, path_);
    return file.rename_to(path_);
  }
  const int fd = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) refuse(path_, "write");
  try {
    write_all(fd, text, path_);
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
}

void write_stdout(std::string_view text) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!whole) throw Error(Errc::io, std::string("cannot write to standard output: ") + std::strerror(errno));
}

}  // namespace sluice::tools
