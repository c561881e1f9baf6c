/* With DLPack's header behind it, tensors are cast. */
#include "sluice.h"

#include "dlpack_like.h"

typedef char same_size[sizeof(DLTensor) == sizeof(sluice_tensor) ? 1 : -1];
typedef char same_offset[offsetof(DLTensor, byte_offset) == offsetof(sluice_tensor, byte_offset) ? 1 : -1];
typedef char same_dtype[offsetof(DLTensor, dtype) == offsetof(sluice_tensor, dtype) ? 1 : -1];

sluice_status import_from(sluice_engine* engine, const DLTensor* k);
sluice_status import_from(sluice_engine* engine, const DLTensor* k) {
  return sluice_engine_import_prefix(engine, 1, 0, (const sluice_tensor*)k, (const sluice_tensor*)k, 0, 0);
}
