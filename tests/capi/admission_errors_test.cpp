// What an admission of C refuses, and what it says.
#include "tests/capi/small_admission.hpp"

using namespace sluice::test::capi;

TEST_CASE("options that no admission can have are refused", "[capi][admission]") {
  const AdmissionPointer admission = create(options_of_c());
  sluice_admission* none = admission.get();
  auto options = options_of_c();
  options.pages = 0;
  check_fails([&] { return sluice_admission_create(&options, &none); }, SLUICE_INVALID_ARGUMENT, {"pages is 0"});
  CHECK(none == nullptr);
  options.struct_size = 2;
  check_fails([&] { return sluice_admission_create(&options, &none); }, SLUICE_INVALID_ARGUMENT, {"struct_size"});
  check_fails([&] { return sluice_admission_options_init(&options, 5000); }, SLUICE_INVALID_ARGUMENT, {"5000"});
}

TEST_CASE("what an admission of C cannot take is refused and changes nothing", "[capi][admission]") {
  const AdmissionPointer admission = create(options_of_c());
  sluice_request asked = request(1, 100, 1);
  const auto submit = [&] { return sluice_admission_submit(admission.get(), &asked); };
  check_fails(submit, SLUICE_OUT_OF_CAPACITY, {"request 1", "100 tokens", "36"});
  asked = request(1, 4, 1, 2);
  check_fails(submit, SLUICE_INVALID_ARGUMENT, {"on_cpu"});
  asked.on_cpu = 0;
  require_ok(submit());

  List preempted, admitted;
  const auto admit = [&] {
    return sluice_admission_admit(admission.get(), nullptr, preempted.ids, &preempted.count, admitted.ids,
                                  &admitted.count);
  };
  admitted.count = kMost - 1;
  check_fails(admit, SLUICE_INVALID_ARGUMENT, {"admitted has room for 2", "3"});
  admitted.count = kMost;
  require_ok(admit());
  CHECK(admitted.get() == Ids{1});

  std::vector<sluice_turn_item> items(kMost, sized<sluice_turn_item>());
  std::size_t count = 1;
  const auto next = [&] { return sluice_admission_next(admission.get(), 0, items.data(), &count); };
  check_fails(next, SLUICE_INVALID_ARGUMENT, {"items has room for 1"});
  count = kMost;
  items[2].struct_size = 4;
  check_fails(next, SLUICE_INVALID_ARGUMENT, {"sluice_turn_item 2"});
  items[2].struct_size = sizeof(sluice_turn_item);
  require_ok(next());
  REQUIRE(count == 1);
  CHECK((items[0].tokens == 4 && items[0].output == 1));

  List ended;
  ended.count = 0;
  const auto complete = [&] { return sluice_admission_complete(admission.get(), 0.0, ended.ids, &ended.count); };
  check_fails(complete, SLUICE_INVALID_ARGUMENT, {"ids has room for 0"});
  ended.count = kMost;
  require_ok(complete());
  CHECK(ended.get() == Ids{1});
  check_fails([&] { return sluice_admission_end(admission.get(), 1); }, SLUICE_NOT_FOUND, {"no request 1"});
}

TEST_CASE("null pointers to and of an admission are refused by their names", "[capi][admission]") {
  const auto refused = [](const std::string& name, const auto& call) {
    CAPTURE(name);
    check_fails(call, SLUICE_INVALID_ARGUMENT, {name + " is null"});
  };
  sluice_admission* none = nullptr;
  auto options = options_of_c();
  const sluice_request asked = request(1, 4, 1);
  auto use = sized<sluice_admission_use>();
  std::vector<sluice_turn_item> items(kMost, sized<sluice_turn_item>());
  List a, b;
  refused("options", [&] { return sluice_admission_options_init(nullptr, sizeof options); });
  refused("sluice_admission_options", [&] { return sluice_admission_create(nullptr, &none); });
  refused("admission", [&] { return sluice_admission_create(&options, nullptr); });
  const auto without = [&](const auto& call) { refused("admission", call); };
  without([&] { return sluice_admission_get_options(none, &options); });
  without([&] { return sluice_admission_submit(none, &asked); });
  without([&] { return sluice_admission_admit(none, nullptr, a.ids, &a.count, b.ids, &b.count); });
  without([&] { return sluice_admission_begun(none, 1, 0); });
  without([&] { return sluice_admission_preempt(none, 1, a.ids, &a.count); });
  without([&] { return sluice_admission_next(none, 0, items.data(), &a.count); });
  without([&] { return sluice_admission_complete(none, 0.0, a.ids, &a.count); });
  without([&] { return sluice_admission_fail(none); });
  without([&] { return sluice_admission_end(none, 1); });
  without([&] { return sluice_admission_running(none, a.ids, &a.count); });
  without([&] { return sluice_admission_get_use(none, &use); });
  sluice_admission_destroy(nullptr);

  const AdmissionPointer owner = create(options);
  sluice_admission* const of = owner.get();
  refused("sluice_admission_options", [&] { return sluice_admission_get_options(of, nullptr); });
  refused("sluice_request", [&] { return sluice_admission_submit(of, nullptr); });
  refused("preempted", [&] { return sluice_admission_admit(of, nullptr, nullptr, &a.count, b.ids, &b.count); });
  refused("preempted's count", [&] { return sluice_admission_admit(of, nullptr, a.ids, nullptr, b.ids, &b.count); });
  refused("admitted", [&] { return sluice_admission_admit(of, nullptr, a.ids, &a.count, nullptr, &b.count); });
  refused("admitted's count", [&] { return sluice_admission_admit(of, nullptr, a.ids, &a.count, b.ids, nullptr); });
  refused("items", [&] { return sluice_admission_next(of, 0, nullptr, &a.count); });
  refused("items's count", [&] { return sluice_admission_next(of, 0, items.data(), nullptr); });
  refused("ids", [&] { return sluice_admission_running(of, nullptr, &a.count); });
  refused("sluice_admission_use", [&] { return sluice_admission_get_use(of, nullptr); });
  CHECK((a.count == kMost && b.count == kMost));
}
