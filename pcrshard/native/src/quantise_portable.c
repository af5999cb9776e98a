/* The kernels of the error-bounded quantiser for any processor. */
#include "quantise.h"

size_t pcr_quantise_f32_portable(const float *values, size_t count, float scale, int8_t *codes) {
    size_t escapes = 0;
    for (size_t i = 0; i < count; i++) {
        codes[i] = pcr_quantise_one(values[i], scale);
        escapes += codes[i] == PCR_ESCAPE;
    }
    return escapes;
}

size_t pcr_quantise_bf16_portable(const uint16_t *values, size_t count, float scale,
                                  int8_t *codes) {
    size_t escapes = 0;
    for (size_t i = 0; i < count; i++) {
        codes[i] = pcr_quantise_one(pcr_from_bfloat16(values[i]), scale);
        escapes += codes[i] == PCR_ESCAPE;
    }
    return escapes;
}

void pcr_dequantise_f32_portable(const int8_t *codes, size_t count, float step, float *values) {
    for (size_t i = 0; i < count; i++) values[i] = pcr_dequantise_one(codes[i], step);
}
