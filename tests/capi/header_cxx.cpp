// sluice.h is C++ by itself, of 2011 already.
#include "sluice.h"

uint32_t header_cxx();
uint32_t header_cxx() { return SLUICE_ABI_VERSION; }
