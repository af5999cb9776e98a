/* Kernels in plain C: the reference for the vector ones, and all there is on other machines. */
#include <stdlib.h>

#include "pcr_internal.h"
#include "entropy_plain.h"
#include "idct.h"
#include "pixels.h"
#include "resize.h"
#include "smooth.h"

#define PCR_NAME(x) portable_##x

static inline void pcr_clear(int16_t *block) { memset(block, 0, 128); }

static inline uint64_t pcr_find(const int16_t *block, uint64_t mask, int shift, int keep) {
    uint64_t found = 0;
    for (; mask; mask &= mask - 1) {
        int place = __builtin_ctzll(mask);
        found |= (uint64_t)((abs(block[63 - place]) >> shift & keep) != 0) << place;
    }
    return found;
}

#include "entropy_body.h"
#include "tokens_body.h"

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
    .tokenize = portable_tokenize,
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
