// Files that sequences are parked in: their names, what had them before, and disks that do not take them.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "runtime/park/park_sink.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

/// What fsync says of files and of directories; 0: what the system says.
int file_error = 0;
int directory_error = 0;

/// Writes `text` as a sequence would be; why it failed, or nothing.
std::string park(const std::string& path, const std::string& text) {
  try {
    runtime::FileSink sink(path);
    std::vector<std::byte> scratch;
    const auto room = sink.room(0, text.size(), scratch);
    std::ranges::copy(std::as_bytes(std::span(text)), room.begin());
    sink.put(0, room);
    sink.finish();
    return "";
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.what();
  }
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

extern "C" int fsync(int descriptor) {
  struct stat status {};
  (void)::fstat(descriptor, &status);
  const int error = S_ISDIR(status.st_mode) ? directory_error : file_error;
  if (error == 0) return static_cast<int>(::syscall(SYS_fsync, descriptor));
  errno = error;
  return -1;
}

TEST_CASE("a file whose name may not be on the disk is there, and that is said", "[park]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/parked";
  for (const int harmless : {EINVAL, ENOTSUP}) {
    directory_error = harmless;
    REQUIRE(park(path, "first").empty());
  }
  directory_error = EIO;
  const std::string why = park(path, "second");
  directory_error = 0;
  CAPTURE(why);
  REQUIRE(has(why, "io: "));
  REQUIRE(has(why, "may not survive a power cut"));
  REQUIRE(content_of(path) == "second");
  file_error = EIO;
  const std::string failed = park(path, "third");
  file_error = 0;
  CAPTURE(failed);
  REQUIRE(has(failed, "there as it was"));
  REQUIRE(content_of(path) == "second");
  REQUIRE(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 1);
}

TEST_CASE("a file to park in may have any name that a file may have", "[park]") {
  const TemporaryDirectory directory;
  for (const std::size_t length : {1u, 249u, 250u, 255u}) {
    CAPTURE(length);
    const std::string path = directory.path() + "/" + std::string(length, 'n');
    REQUIRE(park(path, "text").empty());
    REQUIRE(content_of(path) == "text");
  }
  REQUIRE(has(park(directory.path() + "/" + std::string(256, 'n'), "text"), "look for it"));
  REQUIRE(has(park("", "text"), "look for it"));
  REQUIRE(has(park(directory.path() + "/none/parked", "text"), "open its directory"));
  REQUIRE(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 4);
}

TEST_CASE("a link that has the name of a file to park in is replaced, not what it leads to", "[park]") {
  const TemporaryDirectory directory;
  const std::string target = directory.path() + "/target";
  const std::string link = directory.path() + "/link";
  REQUIRE(park(target, "target").empty());
  for (const std::string& to : {target, directory.path() + "/nowhere"}) {
    std::filesystem::create_symlink(to, link);
    REQUIRE(park(link, "parked").empty());
    REQUIRE_FALSE(std::filesystem::is_symlink(link));
    REQUIRE(content_of(link) == "parked");
    REQUIRE(content_of(target) == "target");
    std::filesystem::remove(link);
  }
  std::filesystem::create_symlink(directory.path(), link);
  REQUIRE(has(park(link, "parked"), "no ordinary file"));
  REQUIRE(std::filesystem::is_symlink(link));
}
