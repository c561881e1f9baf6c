#include "tools/llama/cuda/cublas_lt.hpp"

#include <cublasLt.h>
#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "tools/llama/cuda/check.hpp"

namespace sluice::tools::cuda {
namespace {

/// The entry points in use, with the types of the header. Loaded once and never unloaded.
class Library {
 public:
  [[nodiscard]] static const Library& get() {
    static const Library library;  // a failure is tried again at the next call
    return library;
  }

 private:
  static void* open();
  /// An entry point that converts to whatever function it initialises.
  struct Symbol {
    void* address;
    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  [[nodiscard]] Symbol find(const char* name) const {
    void* address = dlsym(handle_, name);
    if (address == nullptr) {
      throw Error(Errc::unsupported, std::string("libcublasLt.so.13 lacks ") + name + "; install cuBLAS 13");
    }
    return {address};
  }
  void* handle_ = open();

 public:
  decltype(&cublasLtCreate) create = find("cublasLtCreate");
  decltype(&cublasLtGetStatusString) status_string = find("cublasLtGetStatusString");
  decltype(&cublasLtMatmul) matmul = find("cublasLtMatmul");
  decltype(&cublasLtMatmulDescCreate) desc_create = find("cublasLtMatmulDescCreate");
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = find("cublasLtMatmulDescDestroy");
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = find("cublasLtMatmulDescSetAttribute");
  decltype(&cublasLtMatrixLayoutCreate) layout_create = find("cublasLtMatrixLayoutCreate");
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = find("cublasLtMatrixLayoutDestroy");
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = find("cublasLtMatmulPreferenceCreate");
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = find("cublasLtMatmulPreferenceDestroy");
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = find("cublasLtMatmulPreferenceSetAttribute");
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = find("cublasLtMatmulAlgoGetHeuristic");

  void check(cublasStatus_t status, const char* what) const {
    if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
      return;
    throw Error(Errc::device, std::string("cuBLASLt: cannot ") + what + ": " + status_string(status));
  }
};

void* Library::open() {
  std::string reason;
  // By the loader's own search first, then where the toolkit installs itself.
  for (const char* name : {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
    if (reason.empty()) reason = dlerror();
  }
  throw Error(Errc::unsupported, "a model on the GPU needs cuBLAS 13 (" + reason +
                                     "); install it (libcublas-13-0, or pip's nvidia-cublas) or set LD_LIBRARY_PATH");
}

using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, decltype(&cublasLtMatmulDescDestroy)>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, decltype(&cublasLtMatrixLayoutDestroy)>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, decltype(&cublasLtMatmulPreferenceDestroy)>;

/// cuBLASLt is column-major, where our row-major y = x w^T reads y^T = w x^T: `w` is an [inner, outs] matrix to be
/// transposed, `x` an [inner, rows] one, `y` [outs, rows].
struct Plan {
  Desc desc;
  Layout w;
  Layout x;
  Layout y;
  cublasLtMatmulAlgo_t algo{};
};

Layout make_layout(const Library& library, cudaDataType_t type, std::uint64_t rows, std::uint64_t columns) {
  cublasLtMatrixLayout_t raw = nullptr;
  library.check(library.layout_create(&raw, type, rows, columns, static_cast<std::int64_t>(rows)), "describe a matrix");
  return {raw, library.layout_destroy};
}

Desc make_desc(const Library& library) {
  cublasLtMatmulDesc_t raw = nullptr;
  library.check(library.desc_create(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a product");
  Desc desc(raw, library.desc_destroy);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  library.check(library.desc_set(raw, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose), "describe a product");
  return desc;
}

Preference make_preference(const Library& library) {
  cublasLtMatmulPreference_t raw = nullptr;
  library.check(library.preference_create(&raw), "prepare the heuristic");
  Preference preference(raw, library.preference_destroy);
  const std::uint64_t bytes = CublasLt::kWorkspaceBytes;
  library.check(library.preference_set(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
                "prepare the heuristic");
  return preference;
}

}  // namespace

struct CublasLt::Impl {
  /// (rows, outs, inner): a prompt's chunks and a batch's steps repeat theirs.
  using Shape = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

  /// That of the current device. It has no end: a model may be static, and then ends after cuBLASLt, which is loaded
  /// when the model multiplies for the first time, and frees its contexts itself.
  [[nodiscard]] static Impl& of_device() {
    static std::mutex guard;
    static auto& all = *new std::map<int, Impl>;
    int ordinal = 0;
    cuda::check(cudaGetDevice(&ordinal), "ask for the current device");
    const std::scoped_lock lock(guard);
    return all.try_emplace(ordinal).first->second;
  }

  Impl() { library.check(library.create(&handle), "start"); }

  [[nodiscard]] Plan make_plan(const Shape& shape) const {
    const auto [rows, outs, inner] = shape;
    Plan plan{.desc = make_desc(library),
              .w = make_layout(library, CUDA_R_16BF, inner, outs),
              .x = make_layout(library, CUDA_R_16BF, inner, rows),
              .y = make_layout(library, CUDA_R_32F, outs, rows)};
    const Preference preference = make_preference(library);
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    library.check(library.heuristic(handle, plan.desc.get(), plan.w.get(), plan.x.get(), plan.y.get(), plan.y.get(),
                                    preference.get(), 1, &found, &count),
                  "choose an algorithm");
    if (count == 0) {
      throw Error(Errc::unsupported, "cuBLASLt has no algorithm for " + std::to_string(rows) + " rows of " +
                                         std::to_string(inner) + " by " + std::to_string(outs) + " weights in bf16");
    }
    library.check(found.state, "choose an algorithm");
    plan.algo = found.algo;
    return plan;
  }

  [[nodiscard]] const Plan& plan_for(const Shape& shape) {
    const std::scoped_lock lock(mutex);
    const auto at = plans.find(shape);
    return at != plans.end() ? at->second : plans.emplace(shape, make_plan(shape)).first->second;
  }

  const Library& library = Library::get();
  cublasLtHandle_t handle = nullptr;
  std::mutex mutex;  ///< guards the map; its nodes stay where they are
  std::map<Shape, Plan> plans;
};

CublasLt::CublasLt() : impl_(Impl::of_device()) {}

void CublasLt::multiply(const ProductArgs& args, std::span<std::byte> workspace, cudaStream_t stream) const {
  const Plan& plan = impl_.plan_for({args.rows, args.outs, args.inner});
  const float alpha = 1.f;
  const float beta = args.add ? 1.f : 0.f;
  impl_.library.check(impl_.library.matmul(impl_.handle, plan.desc.get(), &alpha, args.w, plan.w.get(), args.x,
                                           plan.x.get(), &beta, args.y, plan.y.get(), args.y, plan.y.get(), &plan.algo,
                                           workspace.data(), workspace.size(), stream),
                      "multiply");
}

}  // namespace sluice::tools::cuda
