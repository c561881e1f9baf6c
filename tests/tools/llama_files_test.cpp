// Reading of files: what is no file, what fails half-way, and what is too large.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/model.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::failure_of;
using sluice::test::mentions;
using sluice::test::TemporaryDirectory;
using sluice::test::TinyModel;

/// Reads fail after this many bytes; negative: never. Of this process: read() and pread() below stand before libc's.
std::atomic<long> bytes_until_failure{-1};

/// `call(n)` reads n bytes at most; with `count`, or with what is left until the failure.
template <class Call>
ssize_t read_some(std::size_t count, const Call& call) {
  const long left = bytes_until_failure.load();
  if (left < 0) return call(count);
  if (left == 0) {
    errno = EIO;
    return -1;
  }
  const ssize_t done = call(std::min(static_cast<std::size_t>(left), count));
  if (done > 0) bytes_until_failure = left - done;
  return done;
}

/// A disk that fails after `bytes` bytes, for as long as this lives.
struct FailingDisk {
  explicit FailingDisk(long bytes) { bytes_until_failure = bytes; }
  ~FailingDisk() { bytes_until_failure = -1; }
};

}  // namespace

extern "C" ssize_t read(int file, void* to, size_t count) {
  return read_some(count, [&](std::size_t most) { return ::syscall(SYS_read, file, to, most); });
}

extern "C" ssize_t pread(int file, void* to, size_t count, off_t offset) {
  return read_some(count, [&](std::size_t most) { return ::syscall(SYS_pread64, file, to, most, offset); });
}

extern "C" ssize_t pread64(int file, void* to, size_t count, off_t offset) { return pread(file, to, count, offset); }

TEST_CASE("a file is read whole, bytes as they are", "[llama][files]") {
  const TemporaryDirectory scratch;
  std::string bytes;
  for (int i = 0; i < 300'000; ++i) bytes.push_back(static_cast<char>(i * 7));
  CHECK(read_text_file(scratch.write("some", bytes)) == bytes);
  CHECK(read_text_file(scratch.write("none", "")).empty());
  CHECK_FALSE(read_text_file("/proc/self/status").empty());  // a regular file of "0 bytes"
}

TEST_CASE("a disk that fails half-way is an error, not a shorter text", "[llama][files]") {
  const TemporaryDirectory scratch;
  const auto file = scratch.write("prompt", std::string(10'000, 'x'));
  for (const long bytes : {0L, 1L, 4096L, 9'999L}) {
    CAPTURE(bytes);
    const auto failure = failure_of([&] {
      const FailingDisk disk(bytes);
      (void)read_text_file(file);
    });
    CHECK(failure.code == Errc::io);
    CHECK(mentions(failure.message, {file}));
  }
  CHECK(failure_of([] { (void)read_text_file("/proc/self/mem"); }).code == Errc::io);  // offset 0 is not mapped
}

TEST_CASE("a disk that fails while weights are read is an error that names the file", "[llama][files]") {
  const TemporaryDirectory scratch;
  TinyModel().write(scratch.path());
  const auto whole = static_cast<long>(std::filesystem::file_size(scratch.file("model.safetensors")) +
                                       std::filesystem::file_size(scratch.file("config.json")));
  for (const long bytes : {whole / 4, whole / 2, whole - 1}) {
    CAPTURE(bytes);
    const auto failure = failure_of([&] {
      const FailingDisk disk(bytes);
      const Model model(scratch.path(), {.threads = 1});
    });
    CHECK(failure.code == Errc::io);
    CHECK(mentions(failure.message, {"model.safetensors"}));
  }
}

TEST_CASE("a pipe or socket or device or directory in the place of a file is refused at once", "[llama][files]") {
  const TemporaryDirectory scratch;
  const auto place = scratch.file("config.json");
  const int kind = GENERATE(0, 1, 2, 3);
  CAPTURE(kind);
  if (kind == 0) REQUIRE(::mkfifo(place.c_str(), 0600) == 0);
  if (kind == 1) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    REQUIRE(place.size() < sizeof address.sun_path);
    std::strcpy(address.sun_path, place.c_str());
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    REQUIRE(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    ::close(socket);
  }
  if (kind == 2) std::filesystem::create_symlink("/dev/zero", place);
  if (kind == 3) std::filesystem::create_directory(place);
  const auto failure = failure_of([&] { const Model model(scratch.path()); });
  CHECK(failure.code == Errc::io);
  CHECK(mentions(failure.message, {place}));
}

TEST_CASE("pipes in the places of the other files of a model are refused too", "[llama][files]") {
  const std::string name = GENERATE("model.safetensors", "model.safetensors.index.json", "generation_config.json");
  CAPTURE(name);
  const TemporaryDirectory scratch;
  TinyModel().write(scratch.path());
  if (name == "model.safetensors.index.json") std::filesystem::remove(scratch.file("model.safetensors"));
  std::filesystem::remove(scratch.file(name));
  REQUIRE(::mkfifo(scratch.file(name).c_str(), 0600) == 0);
  const auto failure = failure_of([&] { const Model model(scratch.path(), {.threads = 1}); });
  CHECK(failure.code == Errc::io);
  CHECK(mentions(failure.message, {name}));
}
