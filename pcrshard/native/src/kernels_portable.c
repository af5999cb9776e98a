/* Kernels in plain C: the reference for the vector ones, and all there is on other machines. */
#include "pcr_internal.h"
#include "idct.h"
#include "pixels.h"
#include "resize.h"
#include "smooth.h"

#define PCR_NAME(x) portable_##x

static inline uint64_t pcr_find_zero(uint64_t *cursor, uint64_t zeros, int k, uint32_t step) {
    (void)cursor;
    uint64_t ahead = zeros & (~UINT64_C(0) >> 1 >> k);
    while (--step > 0 && ahead) ahead &= ~UINT64_C(0) >> 1 >> __builtin_clzll(ahead);
    return ahead ? UINT64_C(1) << 63 >> __builtin_clzll(ahead) : 0;
}

static inline uint64_t pcr_spread(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (; mask; bits >>= 1, mask &= mask - 1)
        if (bits & 1) out |= mask & (~mask + 1);
    return out;
}

static inline void pcr_clear(int16_t *block) { memset(block, 0, 128); }

static inline void pcr_correct(int16_t *block, uint64_t which, int16_t step) {
    for (; which; which &= which - 1) {
        int16_t *value = &block[63 - __builtin_ctzll(which)];
        *value = (int16_t)(*value + (*value < 0 ? -step : step));
    }
}

#include "entropy_body.h"

static size_t portable_copy_plain(uint8_t *dst, const uint8_t *src, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, src + i, 8);
        /* A byte of 0xFF is a zero byte of the complement. */
        if ((~word - UINT64_C(0x0101010101010101)) & word & UINT64_C(0x8080808080808080)) break;
        memcpy(dst + i, &word, 8);
    }
    for (; i < size && src[i] != 0xFF; i++) dst[i] = src[i];
    return i;
}

const pcr_kernels pcr_kernels_portable = {
    .name = "native (portable)",
    .copy_plain = portable_copy_plain,
    .dc_first = portable_dc_first,
    .dc_refine = portable_dc_refine,
    .ac_first = portable_ac_first,
    .ac_refine = portable_ac_refine,
    .sequential = portable_sequential,
    .smooth = pcr_smooth_portable,
    .idct8 = pcr_idct8_portable,
    .idct4 = pcr_idct4_portable,
    .idct2 = pcr_idct2_portable,
    .idct1 = pcr_idct1_portable,
    .up_h2v1 = pcr_up_h2v1_portable,
    .up_h2v2 = pcr_up_h2v2_portable,
    .up_h1v2 = pcr_up_h1v2_portable,
    .ycc_rgb_hwc = pcr_ycc_rgb_hwc_portable,
    .ycc_rgb_chw = pcr_ycc_rgb_chw_portable,
    .interleave3 = pcr_interleave3_portable,
    .resize_row = pcr_resize_row_portable,
    .resize_column = pcr_resize_column_portable,
};
