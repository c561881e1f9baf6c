#include "tools/llama/file_digest.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <random>
#include <string_view>
#include <vector>

#include "cpu/machine/crc32c.hpp"
#include "sluice/error.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kDigestLetters = 32;

/// What tells whether a file is as it was.
struct Facts {
  std::string name;   ///< device and inode
  std::string state;  ///< size and times
  std::int64_t changed_s = 0;

  static Facts of(const fs::path& file) {
    struct stat info {};
    if (::stat(file.c_str(), &info) != 0)
      throw Error(Errc::io, "cannot look at " + file.string() + "; name a file that can be read");
    const auto time = [](const timespec& at) { return std::to_string(at.tv_sec) + "." + std::to_string(at.tv_nsec); };
    return {.name = std::to_string(info.st_dev) + "-" + std::to_string(info.st_ino),
            .state = std::to_string(info.st_size) + " " + time(info.st_mtim) + " " + time(info.st_ctim),
            .changed_s = std::max<std::int64_t>(info.st_mtim.tv_sec, info.st_ctim.tv_sec)};
  }
  friend bool operator==(const Facts&, const Facts&) = default;
};

/// Empty if nothing is known of a file in this state.
std::string kept(const fs::path& entry, const std::string& state) {
  std::error_code unknown;
  if (!fs::is_regular_file(entry, unknown)) return {};  // Of a pipe the writer would be waited for.
  std::ifstream in(entry);
  std::string line, digest;
  if (!std::getline(in, line) || line != state || !std::getline(in, digest)) return {};
  const bool whole =
      digest.size() == kDigestLetters && digest.find_first_not_of("0123456789abcdef") == std::string::npos;
  return whole ? digest : std::string();
}

/// Whole or not at all, whatever other processes keep. Failures are no errors: the file is read again next time.
void keep(const fs::path& entry, const std::string& state, const std::string& digest) {
  std::error_code failure;
  fs::create_directories(entry.parent_path(), failure);
  const fs::path temporary =
      entry.string() + ".tmp" + std::to_string(::getpid()) + "-" + std::to_string(std::random_device()());
  bool whole = false;
  {
    std::ofstream out(temporary);
    out << state << '\n' << digest << '\n';
    out.close();
    whole = !out.fail();
  }
  if (whole) fs::rename(temporary, entry, failure);
  if (!whole || failure) fs::remove(temporary, failure);
}

}  // namespace

void Digest::add(std::span<const std::byte> piece) noexcept {
  const std::array<std::uint32_t, 4> next = cpu::crc32c_of_quarters(piece);
  for (std::size_t i = 0; i < next.size(); ++i) {
    const std::array<std::uint32_t, 2> chain{quarters_[i], next[i]};
    quarters_[i] = cpu::crc32c(std::as_bytes(std::span(chain)));
  }
  bytes_ += piece.size();
}

std::string Digest::hex() const {
  std::string text;
  for (std::size_t i = 0; i < quarters_.size(); ++i) {
    char word[9];
    std::snprintf(word, sizeof word, "%08x", quarters_[i] ^ static_cast<std::uint32_t>(i == 0 ? bytes_ : 0));
    text += word;
  }
  return text;
}

std::string digest_of(std::string_view text) {
  Digest digest;
  const auto bytes = std::as_bytes(std::span(text));
  for (std::size_t at = 0; at < bytes.size(); at += Digest::kPieceBytes)
    digest.add(bytes.subspan(at, std::min<std::size_t>(bytes.size() - at, Digest::kPieceBytes)));
  return digest.hex();
}

std::string DigestCache::of(const fs::path& file, const std::function<void(std::uint64_t)>& read) const {
  const Facts before = Facts::of(file);
  const fs::path entry = directory_ / before.name;
  if (!directory_.empty()) {
    if (std::string known = kept(entry, before.state); !known.empty()) return known;
  }
  const RegularFile open(file);
  Digest digest;
  std::vector<std::byte> piece;
  for (std::uint64_t at = 0; at < open.bytes(); at += piece.size()) {
    piece.resize(std::min(open.bytes() - at, Digest::kPieceBytes));
    open.read(at, piece);
    digest.add(piece);
    if (read) read(piece.size());
  }
  if (Facts::of(file) != before)
    throw Error(Errc::corrupt, file.string() + " changed while it was read; begin again when it is whole");
  constexpr std::int64_t kSettled = 2;
  if (!directory_.empty() && before.changed_s + kSettled < std::time(nullptr)) keep(entry, before.state, digest.hex());
  return digest.hex();
}

}  // namespace sluice::tools
