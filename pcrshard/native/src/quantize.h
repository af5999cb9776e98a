/* The kernels of the error-bounded quantizer: one set for any processor, one for AVX2. */
#ifndef PCR_QUANTIZE_H
#define PCR_QUANTIZE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"

enum { PCR_ESCAPE = -128, PCR_EXTREME = 127, PCR_MAX_CODE = 126 };

/* How values become codes. */
typedef struct {
    float scale;     /* 1 / (2 step) */
    float low, high; /* have the codes -127 and 127; NaN for none */
    const float *gains, *offsets;
    size_t across; /* 1 if each value has its own gain and offset, 0 if the first is all's */
} pcr_coding;

/* The code of the value at place i. Every d = gain x + offset but 0 gets a code other than 0, also
 * where |d| * scale underflows; what is not finite or above PCR_MAX_CODE is an escape. */
static inline int8_t pcr_quantize_one(float value, const pcr_coding *how, size_t i) {
    float d = value * how->gains[i * how->across] + how->offsets[i * how->across];
    float magnitude = fabsf(d);
    float code = ceilf(magnitude * how->scale);
    if (value == how->high) return PCR_EXTREME;
    if (value == how->low) return -PCR_EXTREME;
    if (!(code <= PCR_MAX_CODE)) return PCR_ESCAPE;
    if (magnitude > 0 && code < 1) code = 1;
    return (int8_t)(d < 0 ? -code : code);
}

static inline float pcr_from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline float pcr_value_at(const void *values, int type, size_t i) {
    return type == PCR_BFLOAT16 ? pcr_from_bfloat16(((const uint16_t *)values)[i])
                                : ((const float *)values)[i];
}

/* values: float, or uint16_t with the bits of a bfloat16. Both return the number of escapes; the
 * AVX2 kernel leaves the last values of a run to the portable one. */
size_t pcr_quantize_portable(const void *values, int type, size_t first, size_t count,
                             const pcr_coding *how, int8_t *codes);
size_t pcr_quantize_avx2(const void *values, int type, size_t count, const pcr_coding *how,
                         int8_t *codes);
/* Widens a range by the values, if all are finite; returns how many it took, all but the last. */
size_t pcr_range_avx2(const void *values, int type, size_t count, float *range);

#endif
