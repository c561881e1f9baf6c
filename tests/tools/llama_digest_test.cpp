// Digests of files: every byte counts, and what is kept holds for the file as it was alone.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

#include "tests/support/catch.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tools/llama/file_digest.hpp"

using namespace sluice::tools;
using sluice::test::TemporaryDirectory;

namespace {

namespace fs = std::filesystem;

/// As old as what is kept may be.
void age(const std::string& file) {
  const timespec times[] = {{.tv_sec = 1'000'000'000, .tv_nsec = 0}, {.tv_sec = 1'000'000'000, .tv_nsec = 0}};
  REQUIRE(::utimensat(AT_FDCWD, file.c_str(), times, 0) == 0);
}

void flip(const std::string& file, std::uint64_t at) {
  const int descriptor = ::open(file.c_str(), O_RDWR);
  char byte = 0;
  REQUIRE(::pread(descriptor, &byte, 1, static_cast<off_t>(at)) == 1);
  byte ^= 1;
  REQUIRE(::pwrite(descriptor, &byte, 1, static_cast<off_t>(at)) == 1);
  ::close(descriptor);
  age(file);
}

std::string pattern(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 37 + i / 251);
  return text;
}

}  // namespace

TEST_CASE("every byte of a file shows in its digest, its length too", "[llama][digest]") {
  const TemporaryDirectory scratch;
  const DigestCache none{fs::path()};
  const std::size_t piece = Digest::kPieceBytes;
  const std::string file = scratch.write("weights", pattern(2 * piece + 100));
  std::set<std::string> seen{none.of(file)};
  // Beginnings and ends of pieces and of their quarters, and what lies between.
  for (const std::size_t at : {std::size_t{0}, piece / 4 - 1, piece / 4, piece / 2 + 12345, piece - 1, piece,
                               piece + piece / 2, 2 * piece, 2 * piece + 99}) {
    CAPTURE(at);
    flip(file, at);
    REQUIRE(seen.insert(none.of(file)).second);
    flip(file, at);
    REQUIRE_FALSE(seen.insert(none.of(file)).second);
  }
  for (const std::size_t zeros : {0u, 1u, 31u, 32u, 33u}) {
    CAPTURE(zeros);
    const std::string text(zeros, '\0');
    REQUIRE(seen.insert(none.of(scratch.write("zeros", text))).second);
    REQUIRE(none.of(scratch.file("zeros")) == digest_of(text));
  }
}

TEST_CASE("a digest is kept for the file as it was, and for no other", "[llama][digest]") {
  const TemporaryDirectory scratch;
  const DigestCache cache{scratch.file("cache/digests")};
  const std::string file = scratch.write("weights", pattern(5000));
  std::uint64_t read = 0;
  const auto digest = [&] {
    read = 0;
    return cache.of(file, [&](std::uint64_t bytes) { read += bytes; });
  };
  const std::string first = digest();
  CHECK(read == 5000);
  CHECK(digest() == first);  // It has just changed: its next change could have the same times.
  CHECK(read == 5000);
  CHECK_FALSE(fs::exists(scratch.file("cache")));

  // What is kept holds by device, inode, size and times; the time of change cannot be set, so it is waited for.
  while (read != 0) {
    ::usleep(200'000);
    REQUIRE(digest() == first);
  }
  flip(file, 2500);  // Size and time of modification are made the same again by hand.
  age(file);
  CHECK(digest() != first);
  CHECK(read == 5000);

  // What is no digest is not believed.
  const fs::path entry = fs::directory_iterator(scratch.file("cache/digests"))->path();
  const auto spoil = [&](const std::string& text) { std::ofstream(entry, std::ios::trunc) << text; };
  flip(file, 2500);
  for (const std::string text : {"", "5000", "\n\n", "5000 1.0 1.0\nzz"}) {
    CAPTURE(text);
    spoil(text);
    CHECK(digest() == first);
    CHECK(read == 5000);
  }
  // A place that takes nothing costs the next reading alone.
  fs::remove_all(scratch.file("cache"));
  (void)scratch.write("cache", "a file");
  CHECK(digest() == first);
  CHECK(sluice::test::code_of([&] { (void)cache.of(scratch.file("gone")); }) == sluice::Errc::io);
}
