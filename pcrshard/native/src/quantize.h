/* The kernels of the error-bounded quantizer: one set for any processor, one for AVX2. */
#ifndef PCR_QUANTIZE_H
#define PCR_QUANTIZE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { PCR_ESCAPE = -128, PCR_MAX_CODE = 127 };

/* The code of one value; scale is 1 / (2 step). Every value but 0 gets a code other than 0,
 * also where |x| * scale underflows; what is not finite or above PCR_MAX_CODE is an escape. */
static inline int8_t pcr_quantize_one(float value, float scale) {
    float magnitude = fabsf(value);
    float code = ceilf(magnitude * scale);
    if (!(code <= PCR_MAX_CODE)) return PCR_ESCAPE;
    if (magnitude > 0 && code < 1) code = 1;
    return (int8_t)(value < 0 ? -code : code);
}

static inline float pcr_dequantize_one(int8_t code, float step) {
    return (float)(2 * code - (code > 0) + (code < 0)) * step;
}

static inline float pcr_from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

size_t pcr_quantize_f32_portable(const float *values, size_t count, float scale, int8_t *codes);
size_t pcr_quantize_bf16_portable(const uint16_t *values, size_t count, float scale, int8_t *codes);
void pcr_dequantize_f32_portable(const int8_t *codes, size_t count, float step, float *values);

size_t pcr_quantize_f32_avx2(const float *values, size_t count, float scale, int8_t *codes);
size_t pcr_quantize_bf16_avx2(const uint16_t *values, size_t count, float scale, int8_t *codes);
void pcr_dequantize_f32_avx2(const int8_t *codes, size_t count, float step, float *values);

#endif
