/* Sums of two products of 16-bit elements, 32 bits wide; included between PCR_AVX2_BEGIN and _END.
 *
 * pairs_low(x, y) and pairs_high(x, y) take the elements of x and y that unpacklo and unpackhi
 * take; dot(pairs, a, b) is a x + b y. On ARM nothing is interleaved: a multiply-add per vector is
 * faster than what madd takes there.
 */
#if defined(__x86_64__)
typedef __m256i pairs;
#define pairs_low _mm256_unpacklo_epi16
#define pairs_high _mm256_unpackhi_epi16
#define dot(pairs, a, b) \
    _mm256_madd_epi16(pairs, _mm256_set1_epi32((int32_t)((uint32_t)(uint16_t)(int16_t)(a) | \
                                                         (uint32_t)(b) << 16)))
#else
typedef struct {
    int16x4_t x, y;
} pcr_pairs;
typedef struct {
    pcr_pairs low, high;
} pairs;
#define PCR_PAIRS(half, x, y) \
    ((pairs){{vget_##half##_s16((int16x8_t)x.low), vget_##half##_s16((int16x8_t)y.low)}, \
             {vget_##half##_s16((int16x8_t)x.high), vget_##half##_s16((int16x8_t)y.high)}})
PCR_NEON pairs pairs_low(__m256i x, __m256i y) { return PCR_PAIRS(low, x, y); }
PCR_NEON pairs pairs_high(__m256i x, __m256i y) { return PCR_PAIRS(high, x, y); }
PCR_NEON int8x16_t pcr_dot(pcr_pairs p, int a, int b) {
    return (int8x16_t)vmlal_n_s16(vmull_n_s16(p.x, (int16_t)a), p.y, (int16_t)b);
}
PCR_NEON __m256i dot(pairs p, int a, int b) {
    return (__m256i){pcr_dot(p.low, a, b), pcr_dot(p.high, a, b)};
}
#endif
