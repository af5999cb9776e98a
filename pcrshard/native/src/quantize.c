/* The error-bounded quantizer: the choice of the kernels. */
#include "quantize.h"

#include "avx2.h"
#include "pcr.h"

static int use_vectors(int backend) {
#if PCR_HAVE_VECTORS
    return backend != PCR_BACKEND_PORTABLE && pcr_have_vectors();
#else
    (void)backend;
    return 0;
#endif
}

size_t pcr_quantize(const void *values, size_t count, int type, float step, int8_t *codes,
                    int backend) {
    float scale = 1 / (2 * step);
#if PCR_HAVE_VECTORS
    if (use_vectors(backend)) {
        if (type == PCR_BFLOAT16) return pcr_quantize_bf16_avx2(values, count, scale, codes);
        return pcr_quantize_f32_avx2(values, count, scale, codes);
    }
#endif
    if (type == PCR_BFLOAT16) return pcr_quantize_bf16_portable(values, count, scale, codes);
    return pcr_quantize_f32_portable(values, count, scale, codes);
}

void pcr_dequantize(const int8_t *codes, size_t count, float step, float *values, int backend) {
#if PCR_HAVE_VECTORS
    if (use_vectors(backend)) {
        pcr_dequantize_f32_avx2(codes, count, step, values);
        return;
    }
#endif
    pcr_dequantize_f32_portable(codes, count, step, values);
}

static uint8_t predicted(int parts, int most) {
    int code = (parts + 31) >> 5;
    return (uint8_t)(code < 0 ? 0 : code > most ? most : code);
}

static void shift_by_one(uint8_t *codes, const uint8_t *source, const uint8_t *table,
                         size_t count) {
    for (size_t i = 0; i < count; i++) codes[i] += table[source[i]];
}

void pcr_shift_codes(uint8_t *codes, const uint8_t *first, const uint8_t *second,
                     const int16_t *tables, size_t outer, size_t channels, size_t inner, int most,
                     int sign) {
    uint8_t factor = sign < 0 ? 255 : 1, of_one[256];
    for (size_t channel = 0; channel < channels; channel++) {
        const int16_t *table = tables + 256 * channel * (second ? 2 : 1);
        for (int code = 0; !second && code < 256; code++)
            of_one[code] = factor * predicted(table[code], most);
        for (size_t image = 0; image < outer; image++) {
            size_t place = (image * channels + channel) * inner;
            if (!second) {
                shift_by_one(codes + place, first + place, of_one, inner);
                continue;
            }
            for (size_t i = place; i < place + inner; i++)
                codes[i] += factor * predicted(table[first[i]] + table[256 + second[i]], most);
        }
    }
}
