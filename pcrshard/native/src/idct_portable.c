/* Inverse DCTs in plain C. Where libjpeg-turbo's vector code wraps at 16 bits, so does this. */
#include "idct.h"

/* T.81 Figure 5, transposed into memory order: natural position of zigzag index k. */
static const uint8_t natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static inline int16_t wrap(int32_t x) { return (int16_t)x; }

/* Sums beyond 32 bits occur in damaged streams only; they wrap as in the vector code. */
static inline int32_t descale(int64_t x, int n) { return (int32_t)(x + (1 << (n - 1))) >> n; }

static inline int16_t saturate(int32_t x) {
    return (int16_t)(x < -32768 ? -32768 : x > 32767 ? 32767 : x);
}

static inline uint8_t sample(int32_t x) {
    return (uint8_t)(x < -128 ? 0 : x > 127 ? 255 : x + 128);
}

/* Dequantized coefficients in natural order. */
static void dequantize(int16_t out[64], int16_t dc, uint64_t mask, const int16_t *ac,
                       const uint16_t *quant) {
    memset(out, 0, 128);
    out[0] = wrap(dc * quant[0]);
    for (; mask; mask &= mask - 1) {
        int k = 63 - __builtin_ctzll(mask);
        out[natural[k]] = wrap(ac[k] * quant[k]);
    }
}

/* One 8-point transform; in and out are `step` apart. */
static void transform8(const int16_t *in, int step, int32_t out[8]) {
    int32_t in2 = in[2 * step], in6 = in[6 * step];
    int32_t even0 = wrap(in[0] + in[4 * step]) * 8192, even1 = wrap(in[0] - in[4 * step]) * 8192;
    int32_t even3 = in2 * (F_0_541 + F_0_765) + in6 * F_0_541;
    int32_t even2 = in2 * F_0_541 + in6 * (F_0_541 - F_1_847);
    int32_t in1 = in[step], in3 = in[3 * step], in5 = in[5 * step], in7 = in[7 * step];
    int32_t z3 = wrap(in7 + in3), z4 = wrap(in5 + in1);
    int32_t sum3 = z3 * (F_1_175 - F_1_961) + z4 * F_1_175,
        sum4 = z3 * F_1_175 + z4 * (F_1_175 - F_0_390);
    int32_t odd0 = in7 * (F_0_298 - F_0_899) - in1 * F_0_899 + sum3;
    int32_t odd1 = in5 * (F_2_053 - F_2_562) - in3 * F_2_562 + sum4;
    int32_t odd2 = in3 * (F_3_072 - F_2_562) - in5 * F_2_562 + sum3;
    int32_t odd3 = in1 * (F_1_501 - F_0_899) - in7 * F_0_899 + sum4;
    int32_t t0 = even0 + even3, t3 = even0 - even3, t1 = even1 + even2, t2 = even1 - even2;
    out[0] = t0 + odd3, out[7] = t0 - odd3;
    out[1] = t1 + odd2, out[6] = t1 - odd2;
    out[2] = t2 + odd1, out[5] = t2 - odd1;
    out[3] = t3 + odd0, out[4] = t3 - odd0;
}

static void block8(uint8_t *dst, size_t stride, const int16_t coefficients[64]) {
    int16_t columns[64];
    int32_t out[8];
    for (int x = 0; x < 8; x++) {
        transform8(coefficients + x, 8, out);
        for (int y = 0; y < 8; y++) columns[8 * y + x] = saturate(descale(out[y], 11));
    }
    for (int y = 0; y < 8; y++, dst += stride) {
        transform8(columns + 8 * y, 1, out);
        for (int x = 0; x < 8; x++) dst[x] = sample(descale(out[x], 18));
    }
}

void pcr_idct8_portable(PCR_IDCT_PARAMETERS) {
    int16_t coefficients[64];
    for (int i = 0; i < count; i++, dst += 8, ac += 64) {
        if (mask[i] == 0) {
            for (int y = 0; y < 8; y++)
                memset(dst + (size_t)y * stride, pcr_flat_sample(dc[i], quant[0]), 8);
            continue;
        }
        dequantize(coefficients, dc[i], mask[i], ac, quant);
        block8(dst, stride, coefficients);
    }
}

/* 8 coefficients to 4 samples (jidctred.c); coefficient 4 has no weight. */
static void transform4(const int16_t *in, int step, int64_t out[4]) {
    int64_t t0 = in[0] * 16384, t2 = in[2 * step] * 15137 - in[6 * step] * 6270;
    int64_t in1 = in[step], in3 = in[3 * step], in5 = in[5 * step], in7 = in[7 * step];
    int64_t odd0 = in7 * -1730 + in5 * 11893 + in3 * -17799 + in1 * 8697;
    int64_t odd2 = in7 * -4176 + in5 * -4926 + in3 * 7373 + in1 * 20995;
    out[0] = t0 + t2 + odd2, out[3] = t0 + t2 - odd2;
    out[1] = t0 - t2 + odd0, out[2] = t0 - t2 - odd0;
}

static void block4(uint8_t *dst, size_t stride, const int16_t coefficients[64]) {
    int16_t columns[32];
    int64_t out[4];
    for (int x = 0; x < 8; x++) {
        transform4(coefficients + x, 8, out);
        for (int y = 0; y < 4; y++) columns[8 * y + x] = saturate(descale(out[y], 12));
    }
    for (int y = 0; y < 4; y++, dst += stride) {
        transform4(columns + 8 * y, 1, out);
        for (int x = 0; x < 4; x++) dst[x] = sample(descale(out[x], 19));
    }
}

void pcr_idct4_portable(PCR_IDCT_PARAMETERS) {
    int16_t coefficients[64];
    for (int i = 0; i < count; i++, dst += 4, ac += 64) {
        if (mask[i] == 0) {
            for (int y = 0; y < 4; y++)
                memset(dst + (size_t)y * stride, pcr_flat_sample(dc[i], quant[0]), 4);
            continue;
        }
        dequantize(coefficients, dc[i], mask[i], ac, quant);
        block4(dst, stride, coefficients);
    }
}

/* 8 coefficients to 2 samples (jidctred.c); the even ones but the DC have no weight. */
static void transform2(const int16_t *in, int step, int64_t out[2]) {
    int64_t even = in[0] * 32768;
    int64_t odd = in[7 * step] * -5906 + in[5 * step] * 6967 + in[3 * step] * -10426 +
        in[step] * 29692;
    out[0] = even + odd, out[1] = even - odd;
}

static void block2(uint8_t *dst, size_t stride, const int16_t coefficients[64]) {
    static const uint8_t used[5] = {0, 1, 3, 5, 7};
    int16_t columns[16] = {0};
    int64_t out[2];
    for (int i = 0; i < 5; i++) {
        transform2(coefficients + used[i], 8, out);
        columns[used[i]] = saturate(descale(out[0], 13));
        columns[8 + used[i]] = saturate(descale(out[1], 13));
    }
    for (int y = 0; y < 2; y++, dst += stride) {
        transform2(columns + 8 * y, 1, out);
        for (int x = 0; x < 2; x++) dst[x] = sample(descale(out[x], 20));
    }
}

/* Zigzag indexes that the 2x2 transform looks at: rows and columns 0, 1, 3, 5, 7. */
static uint64_t used_by_2x2(void) {
    uint64_t used = 0;
    for (int k = 0; k < 64; k++) {
        int x = natural[k] & 7, y = natural[k] >> 3;
        if ((x == 0 || x & 1) && (y == 0 || y & 1)) used |= UINT64_C(1) << (63 - k);
    }
    return used;
}

void pcr_idct2_portable(PCR_IDCT_PARAMETERS) {
    const uint64_t used = used_by_2x2();
    int16_t coefficients[64];
    for (int i = 0; i < count; i++, dst += 2, ac += 64) {
        if ((mask[i] & used) == 0) {
            uint8_t flat = pcr_flat_sample(dc[i], quant[0]);
            dst[0] = dst[1] = dst[stride] = dst[stride + 1] = flat;
            continue;
        }
        dequantize(coefficients, dc[i], mask[i] & used, ac, quant);
        block2(dst, stride, coefficients);
    }
}

void pcr_idct1_portable(PCR_IDCT_PARAMETERS) {
    (void)mask, (void)ac, (void)stride;
    for (int i = 0; i < count; i++) dst[i] = pcr_flat_sample(dc[i], quant[0]);
}
