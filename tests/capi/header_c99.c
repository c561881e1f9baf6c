/* sluice.h is C99 by itself. */
#include "sluice.h"

uint32_t header_c99(void);
uint32_t header_c99(void) { return SLUICE_ABI_VERSION; }
