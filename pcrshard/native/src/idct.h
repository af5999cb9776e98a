/* Inverse DCTs, bit-exact with libjpeg-turbo's accurate integer method (jidctint, jidctred). */
#ifndef PCR_IDCT_H
#define PCR_IDCT_H

#include "pcr_internal.h"

/* 13-bit fixed-point constants of Loeffler, Ligtenberg and Moschytz' DCT, as jidctint.c has
 * them. */
enum {
    F_0_298 = 2446, F_0_390 = 3196, F_0_541 = 4433, F_0_765 = 6270, F_0_899 = 7373, F_1_175 = 9633,
    F_1_501 = 12299, F_1_847 = 15137, F_1_961 = 16069, F_2_053 = 16819, F_2_562 = 20995,
    F_3_072 = 25172
};

#define PCR_IDCT_PARAMETERS \
    uint8_t *dst, size_t stride, const int16_t *dc, const uint64_t *mask, const int16_t *ac, \
    const uint16_t *quant, int count

void pcr_idct8_portable(PCR_IDCT_PARAMETERS);
void pcr_idct4_portable(PCR_IDCT_PARAMETERS);
void pcr_idct2_portable(PCR_IDCT_PARAMETERS);
void pcr_idct1_portable(PCR_IDCT_PARAMETERS);
void pcr_idct8_avx2(PCR_IDCT_PARAMETERS);
void pcr_idct4_avx2(PCR_IDCT_PARAMETERS);
void pcr_idct2_avx2(PCR_IDCT_PARAMETERS);

/* Sample of a block that has only its DC: what the full transform gives, too. */
static inline uint8_t pcr_flat_sample(int16_t dc, uint16_t quant) {
    int value = ((int16_t)((int32_t)dc * quant) + 4) >> 3;
    return (uint8_t)(value < -128 ? 0 : value > 127 ? 255 : value + 128);
}

#endif
