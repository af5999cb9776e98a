/* Upsampling and color conversion in plain C. */
#include "pixels.h"

/* Rows carry one sample before and after, equal to their ends: with it the triangle filter needs no
 * special case at the ends, since (4 * x + 1) >> 2 == x and so on. */
void pcr_up_h2v1_portable(PCR_UPSAMPLE_PARAMETERS) {
    (void)far, (void)below;
    for (int i = 0; i < count; i++) {
        int x = 3 * near[i];
        dst[2 * i] = (uint8_t)((x + near[i - 1] + 1) >> 2);
        dst[2 * i + 1] = (uint8_t)((x + near[i + 1] + 2) >> 2);
    }
}

void pcr_up_h2v2_portable(PCR_UPSAMPLE_PARAMETERS) {
    (void)below;
    int last = 3 * near[-1] + far[-1], here = 3 * near[0] + far[0];
    for (int i = 0; i < count; i++) {
        int next = 3 * near[i + 1] + far[i + 1];
        dst[2 * i] = (uint8_t)((3 * here + last + 8) >> 4);
        dst[2 * i + 1] = (uint8_t)((3 * here + next + 7) >> 4);
        last = here, here = next;
    }
}

/* The rounding alternates so that it does not drift (jdsample.c h1v2_fancy_upsample). */
void pcr_up_h1v2_portable(PCR_UPSAMPLE_PARAMETERS) {
    int bias = below ? 2 : 1;
    for (int i = 0; i < count; i++) dst[i] = (uint8_t)((3 * near[i] + far[i] + bias) >> 2);
}

void pcr_replicate(uint8_t *dst, const uint8_t *src, int count, int times) {
    if (times == 1) {
        memcpy(dst, src, (size_t)count);
        return;
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < times; j++) *dst++ = src[i];
}

static inline uint8_t clamp(int x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

/* 16-bit fixed-point form of the JFIF matrix, rounded as jdcolor.c's tables are. */
static inline void ycc_pixel(int y, int cb, int cr, uint8_t *r, uint8_t *g, uint8_t *b) {
    cb -= 128, cr -= 128;
    *r = clamp(y + ((91881 * cr + 32768) >> 16));
    *g = clamp(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
    *b = clamp(y + ((116130 * cb + 32768) >> 16));
}

void pcr_ycc_rgb_hwc_portable(PCR_COLOR_PARAMETERS) {
    uint8_t *out = dst[0];
    for (int i = 0; i < count; i++, out += 3)
        ycc_pixel(src[0][i], src[1][i], src[2][i], out, out + 1, out + 2);
}

void pcr_ycc_rgb_chw_portable(PCR_COLOR_PARAMETERS) {
    for (int i = 0; i < count; i++)
        ycc_pixel(src[0][i], src[1][i], src[2][i], dst[0] + i, dst[1] + i, dst[2] + i);
}

void pcr_interleave3_portable(PCR_COLOR_PARAMETERS) {
    for (int i = 0; i < count; i++)
        for (int c = 0; c < 3; c++) dst[0][3 * i + c] = src[c][i];
}

void pcr_rgb_gray(uint8_t *dst, const uint8_t *const *src, int count) {
    for (int i = 0; i < count; i++)
        dst[i] = (uint8_t)(
            (19595 * src[0][i] + 38470 * src[1][i] + 7471 * src[2][i] + 32768) >> 16);
}

void pcr_cmyk_rgb(uint8_t *const *dst, const uint8_t *const *ink, const uint8_t *key, int count,
                  bool inverted) {
    int mask = inverted ? 0 : 255;
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < count; i++) {
            int product = (ink[c][i] ^ mask) * key[i] + 128;
            dst[c][i] = (uint8_t)(key[i] - ((product + (product >> 8)) >> 8));
        }
}
