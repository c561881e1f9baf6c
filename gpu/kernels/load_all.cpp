#include "gpu/kernels/load_all.hpp"

#include "gpu/device/driver.hpp"
#include "gpu/kernels/attend/attend.hpp"
#include "gpu/kernels/cluster/cluster.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/select/choose_clusters.hpp"
#include "gpu/kernels/select/choose_pages.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "gpu/kernels/select/top_p.hpp"
#include "gpu/kernels/transfer/gather.hpp"
#include "gpu/kernels/transfer/signal.hpp"

namespace sluice::gpu {

KernelLimits load_all_kernels() {
  load_attend_kernels();
  load_cluster_kernels();
  load_choose_clusters_kernels();
  load_choose_pages_kernels();
  load_gather_kernels();
  load_prefill_kernels();
  load_score_int4_kernels();
  load_score_kernels();
  load_select_blocks_kernels();
  load_signal_kernels();
  load_top_k_kernels();
  load_forward_kernels();
  return {.warpgroups = Driver::instance().has_tensor_maps() && load_prefill_hopper_kernels(),
          .attend_ring = load_attend_ring_kernels(),
          .longest_top_p = load_top_p_kernels(),
          .longest_top_k = load_top_k_cluster_kernels(),
          .split = load_forward_split_kernels()};
}

}  // namespace sluice::gpu
