/* Upsampling and color conversion of rows, bit-exact with libjpeg (jdsample, jdcolor). */
#ifndef PCR_PIXELS_H
#define PCR_PIXELS_H

#include "pcr_internal.h"

#define PCR_UPSAMPLE_PARAMETERS \
    uint8_t *dst, const uint8_t *near, const uint8_t *far, int count, int below
#define PCR_COLOR_PARAMETERS uint8_t *const *dst, const uint8_t *const *src, int count

void pcr_up_h2v1_portable(PCR_UPSAMPLE_PARAMETERS);
void pcr_up_h2v2_portable(PCR_UPSAMPLE_PARAMETERS);
void pcr_up_h1v2_portable(PCR_UPSAMPLE_PARAMETERS);
void pcr_ycc_rgb_hwc_portable(PCR_COLOR_PARAMETERS);
void pcr_ycc_rgb_chw_portable(PCR_COLOR_PARAMETERS);
void pcr_interleave3_portable(PCR_COLOR_PARAMETERS);

void pcr_up_h2v1_avx2(PCR_UPSAMPLE_PARAMETERS);
void pcr_up_h2v2_avx2(PCR_UPSAMPLE_PARAMETERS);
void pcr_up_h1v2_avx2(PCR_UPSAMPLE_PARAMETERS);
void pcr_ycc_rgb_hwc_avx2(PCR_COLOR_PARAMETERS);
void pcr_ycc_rgb_chw_avx2(PCR_COLOR_PARAMETERS);
void pcr_interleave3_avx2(PCR_COLOR_PARAMETERS);

/* Each sample `times` times: what libjpeg does for ratios that have no triangle filter. */
void pcr_replicate(uint8_t *dst, const uint8_t *src, int count, int times);
/* Luma of RGB rows (jdcolor.c rgb_gray_convert). */
void pcr_rgb_gray(uint8_t *dst, const uint8_t *const *src, int count);
/* RGB of CMYK rows, 255 being no ink, as Pillow converts them without a profile. Rows of the first
 * three inks may be inverted: YCCK's are, once they are converted like YCbCr. */
void pcr_cmyk_rgb(uint8_t *const *dst, const uint8_t *const *ink, const uint8_t *key, int count,
                  bool inverted);

#endif
