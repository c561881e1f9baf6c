// No exception leaves a function of C, whatever it is. On its own: the shared library hides what is tested here.
#include "capi/guard.hpp"

#include <new>
#include <stdexcept>
#include <system_error>

#include "tests/support/catch.hpp"

using namespace sluice;

namespace {

template <class Exception>
void check(const Exception& exception, sluice_status want, const std::string& words) {
  CHECK(capi::guarded([&] { throw exception; }) == want);
  INFO(sluice_last_error());
  CHECK(std::string(sluice_last_error()).find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("every code of an Error is a status of its own", "[capi][errors]") {
  check(Error(Errc::invalid_argument, "text a"), SLUICE_INVALID_ARGUMENT, "text a");
  check(Error(Errc::out_of_capacity, "text b"), SLUICE_OUT_OF_CAPACITY, "text b");
  check(Error(Errc::unsupported, "text c"), SLUICE_UNSUPPORTED, "text c");
  check(Error(Errc::not_found, "text d"), SLUICE_NOT_FOUND, "text d");
  check(Error(Errc::corrupt, "text e"), SLUICE_CORRUPT, "text e");
  check(Error(Errc::io, "text f"), SLUICE_IO, "text f");
  check(Error(Errc::device, "text g"), SLUICE_DEVICE, "text g");
  check(Error(Errc::timeout, "text h"), SLUICE_TIMEOUT, "text h");
  check(Error(Errc::internal, "text i"), SLUICE_INTERNAL, "text i");
}

TEST_CASE("what is no Error is told, too", "[capi][errors]") {
  check(std::bad_alloc(), SLUICE_OUT_OF_CAPACITY, "memory");
  check(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)), SLUICE_OUT_OF_CAPACITY,
        "raise its limit");
  check(std::runtime_error("unheard of"), SLUICE_INTERNAL, "unheard of");
  check(7, SLUICE_INTERNAL, "report");
}

TEST_CASE("a text that is too long loses its end", "[capi][errors]") {
  const std::string text(10'000, 'x');
  CHECK(capi::guarded([&] { throw Error(Errc::io, text); }) == SLUICE_IO);
  const std::string said = sluice_last_error();
  CHECK(said.size() == 4095);
  CHECK(text.starts_with(said));
}
