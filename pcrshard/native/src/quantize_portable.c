/* The kernels of the error-bounded quantizer for any processor. */
#include "quantize.h"

size_t pcr_quantize_f32_portable(const float *values, size_t count, float scale, int8_t *codes) {
    size_t escapes = 0;
    for (size_t i = 0; i < count; i++) {
        codes[i] = pcr_quantize_one(values[i], scale);
        escapes += codes[i] == PCR_ESCAPE;
    }
    return escapes;
}

size_t pcr_quantize_bf16_portable(const uint16_t *values, size_t count, float scale,
                                  int8_t *codes) {
    size_t escapes = 0;
    for (size_t i = 0; i < count; i++) {
        codes[i] = pcr_quantize_one(pcr_from_bfloat16(values[i]), scale);
        escapes += codes[i] == PCR_ESCAPE;
    }
    return escapes;
}

void pcr_dequantize_f32_portable(const int8_t *codes, size_t count, float step, float *values) {
    for (size_t i = 0; i < count; i++) values[i] = pcr_dequantize_one(codes[i], step);
}
