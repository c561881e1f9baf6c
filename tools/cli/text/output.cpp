#include "tools/cli/text/output.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

const char* remedy_of(int cause) {
  if (cause == ENOSPC || cause == EDQUOT) return "; make room there, or choose a path on another file system";
  if (cause == EFBIG) return "; raise `ulimit -f`, or choose a path on another file system";
  return "; choose a path in an existing directory that you may write to";
}

[[noreturn]] void refuse(const std::string& path, const std::string& action) {
  const int cause = errno;
  throw Error(Errc::io, "cannot " + action + " '" + path + "': " + std::strerror(cause) + remedy_of(cause));
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

/// Where the file really is, or will be.
std::string behind_links(const std::string& path) {
  std::error_code failure;
  const std::filesystem::path real = std::filesystem::weakly_canonical(std::filesystem::absolute(path), failure);
  if (failure) return path;
  // A link to a file that is yet to be made is not followed by weakly_canonical.
  const std::filesystem::path target = std::filesystem::read_symlink(real, failure);
  return failure ? real.string() : (real.parent_path() / target).lexically_normal().string();
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

/// Takes everything from everybody, and mixes nothing up.
bool is_null_device(const struct stat& status) {
  struct stat null {};
  return ::stat("/dev/null", &null) == 0 && same_file(status, null);
}

/// Whether the path is another name of an open stream of this process.
bool is_stream(const std::string& path, int fd) {
  struct stat named {};
  struct stat own {};
  return ::stat(path.c_str(), &named) == 0 && ::fstat(fd, &own) == 0 && same_file(named, own) && !is_null_device(own);
}

/// An empty path is standard output.
bool same_place(const std::string& a, const std::string& b) {
  if (a.empty() && b.empty()) return true;
  if (a.empty() || b.empty()) return is_stream(a.empty() ? b : a, STDOUT_FILENO);
  struct stat first {};
  struct stat second {};
  if (::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0) {
    return same_file(first, second) && !is_null_device(first);
  }
  return behind_links(a) == behind_links(b);
}

void write_stream(std::FILE* stream, std::string_view text, const char* name) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stream) == text.size() && std::fflush(stream) == 0;
  if (!whole) throw Error(Errc::io, std::string("cannot write to ") + name + ": " + std::strerror(errno));
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
  if (path_.empty() || is_stream(path_, STDOUT_FILENO)) {
    place_ = Place::standard_output;
    return;
  }
  if (is_stream(path_, STDERR_FILENO)) {
    place_ = Place::standard_error;
    return;
  }
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0) {
    if (!S_ISREG(status.st_mode)) place_ = Place::device;
    if (S_ISDIR(status.st_mode)) {
      errno = EISDIR;
      refuse(path_, "write");
    }
    if (::access(path_.c_str(), W_OK) != 0) refuse(path_, "write");
  }
  if (place_ == Place::device) return;
  real_path_ = behind_links(path_);
  TemporaryFile(temporary_name(real_path_), path_);
}

void OutputTarget::commit(std::string_view text) const {
  if (place_ == Place::standard_output) return write_stdout(text);
  if (place_ == Place::standard_error) return write_stderr(text);
  if (place_ == Place::file) {
    TemporaryFile file(temporary_name(real_path_), path_);
    write_all(file.fd(), text, path_);
    return file.rename_to(real_path_);
  }
  const int fd = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) refuse(path_, "write");
  try {
    write_all(fd, text, path_);
  } catch (...) {
    ::close(fd);
    throw;
  }
  if (::close(fd) != 0) refuse(path_, "write");
}

OutputTarget OutputTarget::beside(const std::string& name) const {
  const std::filesystem::path path(path_);
  const std::string file = path.stem().string() + "-" + name + path.extension().string();
  return OutputTarget((path.parent_path() / file).string());
}

void require_distinct(std::initializer_list<NamedPath> paths) {
  for (const NamedPath* a = paths.begin(); a != paths.end(); ++a) {
    for (const NamedPath* b = a + 1; b != paths.end(); ++b) {
      if (!a->used || !b->used || !same_place(a->path, b->path)) continue;
      const std::string place = a->path.empty() || b->path.empty() ? "standard output" : "'" + b->path + "'";
      throw Error(Errc::invalid_argument, std::string(a->option) + " and " + b->option + " both write to " + place +
                                              ", where one would destroy the other; give each a file of its own");
    }
  }
}

void write_stdout(std::string_view text) { write_stream(stdout, text, "standard output"); }

void write_stderr(std::string_view text) { write_stream(stderr, text, "standard error"); }

}  // namespace sluice::tools
