#include "tools/llama/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

constexpr std::size_t kPieceBytes = 256 * 1024;

[[noreturn]] void fail(const std::string& name, const std::string& what, int cause) {
  throw Error(cause == ENOENT || cause == ENOTDIR ? Errc::not_found : Errc::io,
              name + ": " + what + ": " + std::strerror(cause) + "; name a file that can be read");
}

[[noreturn]] void refuse_length(const std::string& name, std::uint64_t most_bytes) {
  throw Error(Errc::corrupt, name + ": longer than the " + std::to_string(most_bytes) +
                                 " bytes that such a file may have; is it the right file?");
}

[[noreturn]] void refuse_truncated(const std::string& name, std::uint64_t ends, std::uint64_t expected) {
  throw Error(Errc::corrupt, name + ": ends at byte " + std::to_string(ends) + " where " + std::to_string(expected) +
                                 " were expected: truncated while it was read? Fetch it again");
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

/// Reads from the current position to the end.
std::string read_to_end(int file, const std::string& name, std::uint64_t expected_bytes, std::uint64_t most_bytes) {
  if (expected_bytes > most_bytes) refuse_length(name, most_bytes);
  std::string text;
  for (std::size_t done = 0;;) {
    // One byte more than expected, so that the end is found by the last read.
    if (done == text.size())
      text.resize(std::max<std::uint64_t>(expected_bytes + 1, done + std::max(done / 2, kPieceBytes)));
    const ssize_t count = ::read(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(name, "cannot read after byte " + std::to_string(done), errno);
    done += static_cast<std::size_t>(count);
    if (done > most_bytes) refuse_length(name, most_bytes);
    if (count > 0) continue;
    text.resize(done);
    return text;
  }
}

}  // namespace

RegularFile::Descriptor::~Descriptor() {
  if (value >= 0) ::close(value);
}

RegularFile::RegularFile(const std::filesystem::path& path)
    : name_(path.string()), descriptor_(std::make_unique<Descriptor>()) {
  // Without O_NONBLOCK the open of a pipe waits for a writer.
  descriptor_->value = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  // A socket cannot be opened (ENXIO), whatever it is called.
  if (descriptor_->value < 0) fail(name_, "cannot open", errno);
  struct stat info {};
  if (::fstat(descriptor_->value, &info) != 0) fail(name_, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) {
    throw Error(Errc::io, name_ + ": cannot read: is " + kind_of(info.st_mode) + "; name a regular file");
  }
  bytes_ = static_cast<std::uint64_t>(info.st_size);
}

void RegularFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  for (std::size_t done = 0; done < out.size();) {
    const std::uint64_t at = offset + done;
    const ssize_t count = ::pread(descriptor_->value, out.data() + done, out.size() - done, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(name_, "cannot read at byte " + std::to_string(at), errno);
    if (count == 0) refuse_truncated(name_, at, offset + out.size());
    done += static_cast<std::size_t>(count);
  }
}

std::string RegularFile::read_all(std::uint64_t most_bytes) const {
  std::string text = read_to_end(descriptor_->value, name_, bytes_, most_bytes);
  if (text.size() < bytes_) refuse_truncated(name_, text.size(), bytes_);
  return text;
}

std::string read_text_file(const std::filesystem::path& file, std::uint64_t most_bytes) {
  return RegularFile(file).read_all(most_bytes);
}

std::string read_input(const std::string& name, std::uint64_t most_bytes) {
  if (name == "-") return read_to_end(STDIN_FILENO, "standard input", 0, most_bytes);
  struct stat info {};
  if (::stat(name.c_str(), &info) != 0 || !S_ISFIFO(info.st_mode)) return read_text_file(name, most_bytes);
  const int pipe = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (pipe < 0) fail(name, "cannot open", errno);
  struct Close {
    int file;
    ~Close() { ::close(file); }
  } close{pipe};
  return read_to_end(pipe, name, 0, most_bytes);
}

}  // namespace sluice::tools
