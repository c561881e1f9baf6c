// Tensors that the C interface refuses.
#include <functional>

#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

namespace {

/// What spoils a tensor of [kRows, heads, kHeadDim], and what is said then, behind the tensor's name.
struct Spoiler {
  const char* what;
  std::function<void(CTensor&)> spoil;
  std::vector<std::string> words;
};

std::vector<Spoiler> spoilers() {
  return {
      {"ndim 2", [](CTensor& t) { t.tensor.ndim = 2; }, {".ndim is 2", "must be 3"}},
      {"ndim 4", [](CTensor& t) { t.tensor.ndim = 4; }, {".ndim is 4"}},
      {"no shape", [](CTensor& t) { t.tensor.shape = nullptr; }, {".shape is null"}},
      {"negative size", [](CTensor& t) { t.shape[1] = -1; }, {".shape[1] is -1"}},
      {"huge size", [](CTensor& t) { t.shape[0] = std::int64_t{1} << 32; }, {".shape[0] is 4294967296"}},
      {"too many rows", [](CTensor& t) { t.shape[0] = kRows + 1; }, {"is [3, ", "needs [2, "}},
      {"no rows", [](CTensor& t) { t.shape[0] = 0; }, {"is [0, "}},
      {"other heads", [](CTensor& t) { t.shape[1] = 3; }, {"is [2, 3, 64]"}},
      {"other head_dim", [](CTensor& t) { t.shape[2] = 32; }, {", 32]"}},
      {"f64", [](CTensor& t) { t.tensor.dtype.bits = 64; }, {".dtype", "64 bits", "f32"}},
      {"int32", [](CTensor& t) { t.tensor.dtype.code = 0; }, {".dtype", "code 0"}},
      {"bf32", [](CTensor& t) { t.tensor.dtype.code = SLUICE_TYPE_BFLOAT; }, {".dtype", "code 4"}},
      {"lanes", [](CTensor& t) { t.tensor.dtype.lanes = 4; }, {".dtype", "4 lanes"}},
      {"on a GPU", [](CTensor& t) { t.tensor.device.device_type = SLUICE_DEVICE_CUDA; }, {".device", "type 2", "host"}},
      {"managed", [](CTensor& t) { t.tensor.device.device_type = SLUICE_DEVICE_CUDA_MANAGED; }, {".device", "type 13"}},
      {"elsewhere", [](CTensor& t) { t.tensor.device.device_type = 7; }, {".device", "type 7"}},
      {"no data", [](CTensor& t) { t.tensor.data = nullptr; }, {".data is null"}},
      {"no data, offset", [](CTensor& t) { t.tensor.data = nullptr, t.tensor.byte_offset = 64; }, {".data is null"}},
      {"odd offset", [](CTensor& t) { t.tensor.byte_offset = 2; }, {"byte_offset 2", "4 bytes"}},
      {"columns",
       [](CTensor& t) {
         t.set_strides({t.shape[1] * 64, 1, t.shape[1]});
       },
       {".strides[2]", "contiguous"}},
      {"backwards",
       [](CTensor& t) {
         t.set_strides({-64, 64, 1});
       },
       {".strides[0] is -64", "negative"}},
      {"far tokens", [](CTensor& t) { t.set_strides({std::int64_t{1} << 62, 64, 1}); }, {".shape and .strides", "further"}},
      {"far heads", [](CTensor& t) { t.set_strides({64, std::int64_t{1} << 62, 1}); }, {".shape and .strides", "further"}},
      {"both far",
       [](CTensor& t) {
         t.set_strides({std::int64_t{1} << 62, std::int64_t{1} << 61, 1});
       },
       {".shape and .strides", "further"}},
      {"far offset", [](CTensor& t) { t.tensor.byte_offset = ~std::uint64_t{63}; }, {".shape and .strides", "byte_offset"}},
      {"huge heads", [](CTensor& t) { t.shape[1] = t.shape[2] = 0xffff'ffff; }, {".shape"}},
      {"mirrored",
       [](CTensor& t) {
         t.set_strides({t.shape[1] * 64, 64, -1});
       },
       {".strides[2] is -1"}},
  };
}

}  // namespace

TEST_CASE("attend refuses tensors that break the rules, by name", "[capi][errors]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  require_ok(small.plan(&forward));
  for (const Spoiler& spoiler : spoilers()) {
    for (const std::string name : {"q", "k", "v", "out"}) {
      CAPTURE(spoiler.what, name);
      Tensors t;
      CTensor& tensor = name == "q" ? t.q : name == "k" ? t.k : name == "v" ? t.v : t.out;
      spoiler.spoil(tensor);
      std::vector<std::string> words = spoiler.words;
      words[0] = words[0].starts_with("is")  ? name + " " + words[0]
                 : words[0].starts_with(".") ? name + words[0]
                                             : words[0];
      check_fails([&] { return small.attend(0, t); }, SLUICE_INVALID_ARGUMENT, words);
    }
  }
  const Tensors t;  // All of it was refused before anything was done.
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) require_ok(small.attend(layer, t));
  require_ok(sluice_engine_finish(small.engine, forward));
}

TEST_CASE("what is written must not overlap", "[capi][errors]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  require_ok(small.plan(&forward));
  for (const std::vector<std::int64_t>& strides :
       {std::vector<std::int64_t>{0, 64, 1}, {256, 0, 1}, {64, 64, 1}, {32, 128, 1}, {128, 127, 1}, {255, 64, 1}}) {
    CAPTURE(strides[0], strides[1]);
    Tensors t;
    t.out.set_strides(strides);
    check_fails([&] { return small.attend(0, t); }, SLUICE_INVALID_ARGUMENT, {"out.strides", "overlap"});
  }
  Tensors t;  // What is read may: the same keys for both rows.
  t.k.set_strides({0, 64, 1});
  t.q.set_strides({0, 0, 1});
  t.out.set_strides({64, 128, 1});
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) require_ok(small.attend(layer, t));
  require_ok(sluice_engine_finish(small.engine, forward));
}

TEST_CASE("what is never stepped over has any stride", "[capi]") {
  const SmallEngine small;
  Tensors t;
  t.q.shape[0] = t.k.shape[0] = t.v.shape[0] = t.out.shape[0] = t.lse.shape[0] = 1;
  for (CTensor* const tensor : {&t.q, &t.k, &t.v, &t.out}) tensor->set_strides({-1, 64, 1});
  auto bucket = small.bucket;
  bucket.decode_rows = 1;
  const sluice_plan_item item = small.item();
  std::uint64_t forward = 0;
  require_ok(sluice_engine_plan(small.engine, &item, 1, &bucket, nullptr, &forward));
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    require_ok(sluice_engine_attend(small.engine, &bucket, layer, t.q.get(), t.k.get(), t.v.get(), t.out.get(),
                                    t.lse.get(), nullptr));
  require_ok(sluice_engine_finish(small.engine, forward));
}

TEST_CASE("log-sums are f32, compact, and as many as rows and heads", "[capi][errors]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  require_ok(small.plan(&forward));
  const std::vector<Spoiler> all = {
      {"rank", [](CTensor& t) { t.tensor.ndim = 1; }, {"lse.ndim is 1"}},
      {"rows", [](CTensor& t) { t.shape[0] = 1; }, {"lse is [1, 4]", "needs [2, 4]"}},
      {"heads", [](CTensor& t) { t.shape[1] = 2; }, {"lse is [2, 2]"}},
      {"f16", [](CTensor& t) { t.tensor.dtype.bits = 16; }, {"lse.dtype", "f32"}},
      {"device", [](CTensor& t) { t.tensor.device.device_type = SLUICE_DEVICE_CUDA; }, {"lse.device"}},
      {"padded",
       [](CTensor& t) {
         t.set_strides({kQHeads + 4, 1});
       },
       {"lse.strides[0] is 8", "compact"}},
      {"columns",
       [](CTensor& t) {
         t.set_strides({1, kRows});
       },
       {"lse.strides[1]"}},
      {"no data", [](CTensor& t) { t.tensor.data = nullptr; }, {"lse.data is null"}},
  };
  for (const Spoiler& spoiler : all) {
    CAPTURE(spoiler.what);
    Tensors t;
    spoiler.spoil(t.lse);
    check_fails([&] { return small.attend(0, t); }, SLUICE_INVALID_ARGUMENT, spoiler.words);
  }
}

TEST_CASE("import refuses tensors that break the rules", "[capi][errors]") {
  const SmallEngine small;
  const auto import = [&](const Tensors& t, std::uint32_t layer) {
    return sluice_engine_import_prefix(small.engine, small.sequence, layer, t.k.get(), t.v.get(), t.q.get(), nullptr);
  };
  for (const Spoiler& spoiler : spoilers()) {
    if (std::string(spoiler.what) == "too many rows" || std::string(spoiler.what) == "no rows") continue;
    for (const std::string name : {"q", "k", "v"}) {
      CAPTURE(spoiler.what, name);
      Tensors t;
      spoiler.spoil(name == "q" ? t.q : name == "k" ? t.k : t.v);
      check_fails([&] { return import(t, 0); }, SLUICE_INVALID_ARGUMENT, {name});
    }
  }
  std::vector<float> many(33 * kKvHeads * kHeadDim);
  const CTensor long_one(many.data(), {33, kKvHeads, kHeadDim});
  check_fails(
      [&] {
        return sluice_engine_import_prefix(small.engine, small.sequence, 0, long_one.get(), long_one.get(), nullptr,
                                           nullptr);
      },
      SLUICE_INVALID_ARGUMENT, {"33 tokens", "import_rows"});
  const Tensors t;
  check_fails([&] { return import(t, 1); }, SLUICE_INVALID_ARGUMENT, {"order"});
  Tensors fewer;  // No queries: an empty tensor is as good as none.
  fewer.q.shape[0] = 0;
  fewer.q.tensor.data = nullptr;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) require_ok(import(fewer, layer));
  std::uint32_t tokens = 0;
  require_ok(sluice_engine_tokens(small.engine, small.sequence, &tokens));
  CHECK(tokens == kRows);
}

TEST_CASE("scores that are missing or too short are refused, and the layer can be given others", "[capi][errors]") {
  auto options = small_options();
  constexpr const char* const kNamed[] = {kPolicy, "scores | top_k=8 | near=0"};
  options.policies = kNamed;
  options.policy_count = 2;
  SmallEngine small(options);
  require_ok(sluice_engine_begin(small.engine, "scores | top_k=8 | near=0", &small.sequence));
  small.bucket.features = SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_SCORES;
  small.bucket.max_tokens = 64;
  std::uint64_t forward = 0;
  require_ok(small.plan(&forward));
  const Tensors t;
  auto args = sized<sluice_attend_args>();
  args.q = t.q.get(), args.k = t.k.get(), args.v = t.v.get(), args.out = t.out.get();
  const auto attend = [&] { return sluice_engine_attend_layer(small.engine, &small.bucket, &args); };
  check_fails([&] { return small.attend(0, t); }, SLUICE_INVALID_ARGUMENT, {"without scores", "[2, 2 or 1, 64]"});
  check_fails(attend, SLUICE_INVALID_ARGUMENT, {"without scores"});
  std::vector<float> numbers(std::size_t{kRows} * 64);
  const CTensor brief(numbers.data(), {kRows, 1, 63});
  args.scores = brief.get();
  check_fails(attend, SLUICE_INVALID_ARGUMENT, {"scores is [2, 1, 63]", "needs [2, 2 or 1, 64]"});
  CTensor strange(numbers.data(), {kRows, 1, 64});
  strange.tensor.device.device_type = SLUICE_DEVICE_CUDA;
  args.scores = strange.get();
  check_fails(attend, SLUICE_INVALID_ARGUMENT, {"scores.device"});
  const CTensor scores(numbers.data(), {kRows, 1, 64});
  args.scores = scores.get();
  for (args.layer = 0; args.layer < kLayers; ++args.layer) require_ok(attend());
  require_ok(sluice_engine_finish(small.engine, forward));
}
