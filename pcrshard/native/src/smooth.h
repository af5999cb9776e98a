/* Block smoothing (T.81 K.8) as libjpeg-turbo does it since 3.0.1: the nine lowest AC coefficients
 * that are not known yet are estimated from the DCs of 5x5 blocks. */
#ifndef PCR_SMOOTH_H
#define PCR_SMOOTH_H

#include "pcr_internal.h"

/* The bits of coefficients 1 to 9 in a block's mask. */
#define PCR_SMOOTHED_AC (UINT64_C(0x1FF) << 54)

enum { PCR_SMOOTH_CHUNK = 16, PCR_SMOOTH_ROWS = 5, PCR_SMOOTH_WIDE = 16 };

/* From how->rows to how->dc, how->mask and how->ac of `count` blocks, in whole chunks; mask and ac
 * are what is known of them. */
#define PCR_SMOOTH_PARAMETERS \
    const pcr_smoothing *how, int count, const uint64_t *mask, const int16_t *ac

/* In 64 bits, for streams that claim what no encoder writes. */
void pcr_smooth_exact(PCR_SMOOTH_PARAMETERS);
void pcr_smooth_portable(PCR_SMOOTH_PARAMETERS);
void pcr_smooth_avx2(PCR_SMOOTH_PARAMETERS);

/* Once the scans are read: what is known of each component. */
void pcr_plan_smoothing(pcr_decoder *dec);
size_t pcr_smoothing_bytes(const pcr_plane *plane);
void pcr_place_smoothing(pcr_plane *plane, uint8_t *at);
/* Puts the block row, smoothed, into the plane's smoothing.dc, .mask and .ac. */
void pcr_smooth_row(const pcr_decoder *dec, int c, int block_row);

#endif
