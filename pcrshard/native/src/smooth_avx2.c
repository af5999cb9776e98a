/* Block smoothing with AVX2. */
#define PCR_NAME(x) pcr_##x##_avx2

#include "smooth.h"

#if PCR_HAVE_AVX2
PCR_AVX2_BEGIN

static inline void pcr_scatter(int16_t *ac,
                               int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK]) {
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++)
        for (int k = 1; k < PCR_SMOOTHED; k++) ac[64 * i + k] = estimate[k][i];
}

#include "smooth_body.h"

PCR_AVX2_END
#endif
