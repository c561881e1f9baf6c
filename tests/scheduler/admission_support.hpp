#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "sluice/admission.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

/// What cases of an Admission share.
namespace sluice::test::admission {

using Ids = std::vector<std::uint64_t>;

[[nodiscard]] inline Ids numbers(const std::vector<RequestId>& ids) {
  Ids values;
  for (const RequestId id : ids) values.push_back(id.value);
  return values;
}

/// Rows of a turn, so that tests can compare them.
struct Rows {
  std::uint64_t request;
  std::uint32_t first, tokens;
  bool prefill, output;
  friend bool operator==(const Rows&, const Rows&) = default;
};
inline std::ostream& operator<<(std::ostream& out, const Rows& rows) {
  return out << rows.request << ": " << rows.tokens << " from " << rows.first << (rows.prefill ? " prefill" : "")
             << (rows.output ? " output" : "");
}

struct Turn {
  Ids preempt, admit;
  std::vector<Rows> rows;
  Ids ended;
};

inline Turn run(Admission& admission, std::uint32_t chunk = 0) {
  Turn turn;
  const AdmissionChanges changes = admission.admit();
  turn.preempt = numbers(changes.preempt);
  turn.admit = numbers(changes.admit);
  for (const TurnItem& item : admission.next(chunk))
    turn.rows.push_back({item.request.value, item.first, item.tokens, item.prefill, item.output});
  if (!turn.rows.empty()) turn.ended = numbers(admission.complete());
  return turn;
}

inline void submit(Admission& admission, std::uint64_t id, std::uint32_t prompt, std::uint32_t most,
                   bool on_cpu = false) {
  admission.submit({.id = RequestId{id}, .prompt_tokens = prompt, .max_new_tokens = most, .on_cpu = on_cpu});
}

template <class Call>
void check_fails(const Call& call, Errc code, const std::string& words) {
  try {
    call();
    FAIL("no error");
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.code() == code);
    CHECK(std::string(error.what()).find(words) != std::string::npos);
  }
}

inline constexpr AdmissionOptions kOptions{
    .decode_rows = 4, .prefill_rows = 64, .prefills = 4, .sequences = 4, .page_tokens = 8, .pages = 16};

}  // namespace sluice::test::admission
