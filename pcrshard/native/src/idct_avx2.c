/* Inverse DCT with AVX2: two neighboring blocks at once, one per 128-bit lane.
 *
 * The same arithmetic as jidctint, hence the same bits as libjpeg-turbo. The masks of non-zero
 * coefficients choose how much of it is needed: a flat block, the 10 lowest coefficients (4 rows
 * and 4 columns), the 32 lowest, or all.
 */
#include "idct.h"

#if PCR_HAVE_VECTORS
#include "avx2.h"

PCR_AVX2_BEGIN

#define INLINE static inline __attribute__((always_inline))
#define OR _mm256_or_si256

#include "products.h"

enum { LEVEL_LOW = 0, LEVEL_MIDDLE = 1, LEVEL_FULL = 2 };

/* Rows of natural order out of groups of 8 coefficients in zigzag order (T.81 Figure 5). */
#if defined(__aarch64__)
#define AT(i) 2 * (i), 2 * (i) + 1
#define ROW(a, b, c, d, e, f, g, h) \
    {AT(a), AT(b), AT(c), AT(d), AT(e), AT(f), AT(g), AT(h)}
/* Where the bytes of each row are among all 128; of a table, NEON takes zero beyond its end. */
static const uint8_t natural[8][16] = {
    ROW(0, 1, 5, 6, 14, 15, 27, 28),
    ROW(2, 4, 7, 13, 16, 26, 29, 42),
    ROW(3, 8, 12, 17, 25, 30, 41, 43),
    ROW(9, 11, 18, 24, 31, 40, 44, 53),
    ROW(10, 19, 23, 32, 39, 45, 52, 54),
    ROW(20, 22, 33, 38, 46, 51, 55, 60),
    ROW(21, 34, 37, 47, 50, 56, 59, 61),
    ROW(35, 36, 48, 49, 57, 58, 62, 63),
};

INLINE void unzigzag(__m256i row[8], const __m256i zigzag[8], int level) {
    const __m256i *in = zigzag, none = _mm256_setzero_si256();
    const bool more = level >= LEVEL_MIDDLE, all = level >= LEVEL_FULL;
#define FOUR(half, a, b, c, d) \
    ((int8x16x4_t){{(a).half, (b).half, (c).half, (d).half}})
    const int8x16x4_t low = FOUR(low, in[0], in[1], more ? in[2] : none, more ? in[3] : none);
    const int8x16x4_t high = FOUR(high, in[0], in[1], more ? in[2] : none, more ? in[3] : none);
    for (int y = 0; y < 8; y++) {
        const uint8x16_t at = vld1q_u8(natural[y]), beyond = vsubq_u8(at, vdupq_n_u8(64));
        row[y] = (__m256i){vqtbl4q_s8(low, at), vqtbl4q_s8(high, at)};
        if (!all) continue;
        row[y].low = vqtbx4q_s8(row[y].low, FOUR(low, in[4], in[5], in[6], in[7]), beyond);
        row[y].high = vqtbx4q_s8(row[y].high, FOUR(high, in[4], in[5], in[6], in[7]), beyond);
    }
#undef FOUR
}
#else
/* Bytes of 16-bit element i of a lane; X gives zero. */
#define X 64
#define LOW(i) ((char)((i) == X ? 0x80 : 2 * (i)))
#define HIGH(i) ((char)((i) == X ? 0x80 : 2 * (i) + 1))
#define BYTES(a, b, c, d, e, f, g, h) \
    LOW(a), HIGH(a), LOW(b), HIGH(b), LOW(c), HIGH(c), LOW(d), HIGH(d), \
    LOW(e), HIGH(e), LOW(f), HIGH(f), LOW(g), HIGH(g), LOW(h), HIGH(h)
#define PICK(group, ...) \
    _mm256_shuffle_epi8(zigzag[group], \
                        _mm256_setr_epi8(BYTES(__VA_ARGS__), BYTES(__VA_ARGS__)))

INLINE void unzigzag(__m256i row[8], const __m256i zigzag[8], int level) {
    row[0] = PICK(0, 0, 1, 5, 6, X, X, X, X);
    row[0] = OR(row[0], PICK(1, X, X, X, X, 6, 7, X, X));
    row[1] = PICK(0, 2, 4, 7, X, X, X, X, X);
    row[1] = OR(row[1], PICK(1, X, X, X, 5, X, X, X, X));
    row[2] = PICK(0, 3, X, X, X, X, X, X, X);
    row[2] = OR(row[2], PICK(1, X, 0, 4, X, X, X, X, X));
    row[3] = PICK(1, 1, 3, X, X, X, X, X, X);
    row[4] = PICK(1, 2, X, X, X, X, X, X, X);
    row[5] = _mm256_setzero_si256();
    row[6] = _mm256_setzero_si256();
    row[7] = _mm256_setzero_si256();
    if (level >= LEVEL_MIDDLE) {
        row[0] = OR(row[0], PICK(3, X, X, X, X, X, X, 3, 4));
        row[1] = OR(row[1], PICK(2, X, X, X, X, 0, X, X, X));
        row[1] = OR(row[1], PICK(3, X, X, X, X, X, 2, 5, X));
        row[2] = OR(row[2], PICK(2, X, X, X, 1, X, X, X, X));
        row[2] = OR(row[2], PICK(3, X, X, X, X, 1, 6, X, X));
        row[3] = OR(row[3], PICK(2, X, X, 2, X, X, X, X, X));
        row[3] = OR(row[3], PICK(3, X, X, X, 0, 7, X, X, X));
        row[4] = OR(row[4], PICK(2, X, 3, 7, X, X, X, X, X));
        row[5] = OR(row[5], PICK(2, 4, 6, X, X, X, X, X, X));
        row[6] = OR(row[6], PICK(2, 5, X, X, X, X, X, X, X));
    }
    if (level >= LEVEL_FULL) {
        row[1] = OR(row[1], PICK(5, X, X, X, X, X, X, X, 2));
        row[2] = OR(row[2], PICK(5, X, X, X, X, X, X, 1, 3));
        row[3] = OR(row[3], PICK(5, X, X, X, X, X, 0, 4, X));
        row[3] = OR(row[3], PICK(6, X, X, X, X, X, X, X, 5));
        row[4] = OR(row[4], PICK(4, X, X, X, 0, 7, X, X, X));
        row[4] = OR(row[4], PICK(5, X, X, X, X, X, 5, X, X));
        row[4] = OR(row[4], PICK(6, X, X, X, X, X, X, 4, 6));
        row[5] = OR(row[5], PICK(4, X, X, 1, 6, X, X, X, X));
        row[5] = OR(row[5], PICK(5, X, X, X, X, 6, X, X, X));
        row[5] = OR(row[5], PICK(6, X, X, X, X, X, 3, 7, X));
        row[5] = OR(row[5], PICK(7, X, X, X, X, X, X, X, 4));
        row[6] = OR(row[6], PICK(4, X, 2, 5, X, X, X, X, X));
        row[6] = OR(row[6], PICK(5, X, X, X, 7, X, X, X, X));
        row[6] = OR(row[6], PICK(6, X, X, X, X, 2, X, X, X));
        row[6] = OR(row[6], PICK(7, X, X, X, X, X, 0, 3, 5));
        row[7] = OR(row[7], PICK(4, 3, 4, X, X, X, X, X, X));
        row[7] = OR(row[7], PICK(6, X, X, 0, 1, X, X, X, X));
        row[7] = OR(row[7], PICK(7, X, X, X, X, 1, 2, 6, 7));
    }
}
#endif

INLINE __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
INLINE __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }

/* Half of the lanes of one transform, 32 bits wide: even[] holds the rounded even part. */
INLINE void butterfly(__m256i out[8], const __m256i even[4], const __m256i odd[4], int shift) {
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_srai_epi32(add(even[i], odd[3 - i]), shift);
        out[7 - i] = _mm256_srai_epi32(sub(even[i], odd[3 - i]), shift);
    }
}

/* in: x0 and x2, x1 and x3 interleaved; x4..x7 are zero. */
INLINE void half_low(__m256i out[8], pairs in02, pairs in13, int shift) {
    const __m256i round = _mm256_set1_epi32(1 << (shift - 1));
    const __m256i even[4] = {add(dot(in02, 8192, F_0_541 + F_0_765), round),
                             add(dot(in02, 8192, F_0_541), round),
                             add(dot(in02, 8192, -F_0_541), round),
                             add(dot(in02, 8192, -F_0_541 - F_0_765), round)};
    const __m256i odd[4] = {dot(in13, F_1_175 - F_0_899, F_1_175 - F_1_961),
                            dot(in13, F_1_175 - F_0_390, F_1_175 - F_2_562),
                            dot(in13, F_1_175, F_3_072 - F_2_562 + F_1_175 - F_1_961),
                            dot(in13, F_1_501 - F_0_899 + F_1_175 - F_0_390, F_1_175)};
    butterfly(out, even, odd, shift);
}

/* in: sum and difference of x0 and x4 times 65536; pairs of the others interleaved. */
INLINE void half_full(__m256i out[8], __m256i sum, __m256i difference, pairs in26, pairs in71,
                      pairs in53, pairs z34, int shift) {
    const __m256i round = _mm256_set1_epi32(1 << (shift - 1));
    __m256i even0 = add(_mm256_srai_epi32(sum, 3), round),
        even1 = add(_mm256_srai_epi32(difference, 3), round);
    __m256i even3 = dot(in26, F_0_541 + F_0_765, F_0_541),
        even2 = dot(in26, F_0_541, F_0_541 - F_1_847);
    __m256i z3 = dot(z34, F_1_175 - F_1_961, F_1_175),
        z4 = dot(z34, F_1_175, F_1_175 - F_0_390);
    const __m256i even[4] = {add(even0, even3), add(even1, even2), sub(even1, even2),
                             sub(even0, even3)};
    const __m256i odd[4] = {add(dot(in71, F_0_298 - F_0_899, -F_0_899), z3),
                            add(dot(in53, F_2_053 - F_2_562, -F_2_562), z4),
                            add(dot(in53, -F_2_562, F_3_072 - F_2_562), z3),
                            add(dot(in71, -F_0_899, F_1_501 - F_0_899), z4)};
    butterfly(out, even, odd, shift);
}

/* One 8-point transform of each lane element over the vectors x[0..7]. */
INLINE void transform(__m256i x[8], int level, int shift) {
    __m256i low[8], high[8];
    if (level == LEVEL_LOW) {
        half_low(low, pairs_low(x[0], x[2]), pairs_low(x[1], x[3]), shift);
        half_low(high, pairs_high(x[0], x[2]), pairs_high(x[1], x[3]), shift);
    } else {
        const __m256i zero = _mm256_setzero_si256();
        __m256i sum = _mm256_add_epi16(x[0], x[4]), difference = _mm256_sub_epi16(x[0], x[4]);
        __m256i z3 = _mm256_add_epi16(x[7], x[3]), z4 = _mm256_add_epi16(x[5], x[1]);
        half_full(low, _mm256_unpacklo_epi16(zero, sum), _mm256_unpacklo_epi16(zero, difference),
                  pairs_low(x[2], x[6]), pairs_low(x[7], x[1]),
                  pairs_low(x[5], x[3]), pairs_low(z3, z4), shift);
        half_full(high, _mm256_unpackhi_epi16(zero, sum), _mm256_unpackhi_epi16(zero, difference),
                  pairs_high(x[2], x[6]), pairs_high(x[7], x[1]),
                  pairs_high(x[5], x[3]), pairs_high(z3, z4), shift);
    }
    for (int i = 0; i < 8; i++) x[i] = _mm256_packs_epi32(low[i], high[i]);
}

#include "transpose_avx2.h"

/* Columns of 16-bit samples around 0 to 8 rows of two blocks' bytes. */
INLINE void store_columns(uint8_t *dst, size_t stride, const __m256i x[8]) {
    const __m256i center = _mm256_set1_epi8((char)0x80);
    __m256i p[4], u[4], rows[4];
    for (int i = 0; i < 4; i++) p[i] = _mm256_xor_si256(_mm256_packs_epi16(x[i], x[i + 4]), center);
    __m256i c01 = _mm256_unpacklo_epi8(p[0], p[1]), c45 = _mm256_unpackhi_epi8(p[0], p[1]);
    __m256i c23 = _mm256_unpacklo_epi8(p[2], p[3]), c67 = _mm256_unpackhi_epi8(p[2], p[3]);
    u[0] = _mm256_unpacklo_epi16(c01, c23), u[1] = _mm256_unpackhi_epi16(c01, c23);
    u[2] = _mm256_unpacklo_epi16(c45, c67), u[3] = _mm256_unpackhi_epi16(c45, c67);
    rows[0] = _mm256_unpacklo_epi32(u[0], u[2]), rows[1] = _mm256_unpackhi_epi32(u[0], u[2]);
    rows[2] = _mm256_unpacklo_epi32(u[1], u[3]), rows[3] = _mm256_unpackhi_epi32(u[1], u[3]);
    for (int i = 0; i < 4; i++, dst += 2 * stride) {
        __m256i two = _mm256_permute4x64_epi64(rows[i], 0xD8);
        _mm_storeu_si128((__m128i *)dst, _mm256_castsi256_si128(two));
        _mm_storeu_si128((__m128i *)(dst + stride), _mm256_extracti128_si256(two, 1));
    }
}

/* Dequantized coefficients of two blocks, in rows. */
INLINE void load_pair(__m256i rows[8], const int16_t *dc, const int16_t *left, const int16_t *right,
                      const uint16_t *quant, int level) {
    const int groups = level == LEVEL_LOW ? 2 : level == LEVEL_MIDDLE ? 4 : 8;
    __m256i zigzag[8];
    for (int i = 0; i < groups; i++) {
        __m256i q = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)quant + i));
        __m128i one = _mm_load_si128((const __m128i *)left + i);
        __m128i other = _mm_load_si128((const __m128i *)right + i);
        if (i == 0) {
            one = _mm_insert_epi16(one, dc[0], 0);
            other = _mm_insert_epi16(other, dc[1], 0);
        }
        __m256i pair = _mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1);
        zigzag[i] = _mm256_mullo_epi16(pair, q);
    }
    unzigzag(rows, zigzag, level);
}

/* Down the columns, of which only the first four are not zero, and transposed. */
INLINE void columns_low(__m256i x[8]) {
    __m256i out[8], rows[4], even[4];
    half_low(out, pairs_low(x[0], x[2]), pairs_low(x[1], x[3]), 11);
    for (int i = 0; i < 4; i++) rows[i] = _mm256_packs_epi32(out[2 * i], out[2 * i + 1]);
    for (int i = 0; i < 4; i += 2) {
        __m256i low = _mm256_unpacklo_epi16(rows[i], rows[i + 1]);
        __m256i high = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
        even[i] = _mm256_unpacklo_epi16(low, high);
        even[i + 1] = _mm256_unpackhi_epi16(low, high);
    }
    x[0] = _mm256_unpacklo_epi64(even[0], even[2]);
    x[1] = _mm256_unpackhi_epi64(even[0], even[2]);
    x[2] = _mm256_unpacklo_epi64(even[1], even[3]);
    x[3] = _mm256_unpackhi_epi64(even[1], even[3]);
}

INLINE void block_pair(uint8_t *dst, size_t stride, const int16_t *dc, const int16_t *left,
                       const int16_t *right, const uint16_t *quant, int level) {
    __m256i rows[8];
    load_pair(rows, dc, left, right, quant, level);
    if (level == LEVEL_LOW) {
        columns_low(rows);
    } else {
        transform(rows, level, 11);
        transpose(rows);
    }
    transform(rows, level, 18);
    store_columns(dst, stride, rows);
}

static void flat_pair(uint8_t *dst, size_t stride, const int16_t *dc, uint16_t quant) {
    uint64_t left = pcr_flat_sample(dc[0], quant) * UINT64_C(0x0101010101010101);
    uint64_t right = pcr_flat_sample(dc[1], quant) * UINT64_C(0x0101010101010101);
    __m128i row = _mm_set_epi64x((int64_t)right, (int64_t)left);
    for (int y = 0; y < 8; y++) _mm_storeu_si128((__m128i *)(dst + (size_t)y * stride), row);
}

/* Writes 8 samples more than asked when count is odd: rows have room. */
void pcr_idct8_avx2(PCR_IDCT_PARAMETERS) {
    static const int16_t zeros[64] __attribute__((aligned(64)));
    for (int i = 0; i < count; i += 2, dst += 16, ac += 128) {
        bool two = i + 1 < count;
        uint64_t mask1 = two ? mask[i + 1] : 0, either = mask[i] | mask1;
        const int16_t pair_dc[2] = {dc[i], two ? dc[i + 1] : 0};
        if (either == 0) {
            flat_pair(dst, stride, pair_dc, quant[0]);
            continue;
        }
        const int16_t *left = mask[i] ? ac : zeros, *right = mask1 ? ac + 64 : zeros;
        if ((either & (~UINT64_C(0) >> 10)) == 0)
            block_pair(dst, stride, pair_dc, left, right, quant, LEVEL_LOW);
        else if ((either & (~UINT64_C(0) >> 32)) == 0)
            block_pair(dst, stride, pair_dc, left, right, quant, LEVEL_MIDDLE);
        else
            block_pair(dst, stride, pair_dc, left, right, quant, LEVEL_FULL);
    }
}

/* Half of the lanes of 8 coefficients to 4 samples (jidctred.c): x0 times 65536, pairs
 * interleaved. */
INLINE void half4(__m256i out[4], __m256i in0, pairs in26, pairs in13, pairs in57, int shift) {
    __m256i even0 = add(_mm256_srai_epi32(in0, 2), _mm256_set1_epi32(1 << (shift - 1)));
    __m256i even2 = dot(in26, 15137, -6270);
    __m256i odd0 = add(dot(in13, 8697, -17799), dot(in57, 11893, -1730));
    __m256i odd2 = add(dot(in13, 20995, 7373), dot(in57, -4926, -4176));
    out[0] = _mm256_srai_epi32(add(add(even0, even2), odd2), shift);
    out[1] = _mm256_srai_epi32(add(sub(even0, even2), odd0), shift);
    out[2] = _mm256_srai_epi32(sub(sub(even0, even2), odd0), shift);
    out[3] = _mm256_srai_epi32(sub(add(even0, even2), odd2), shift);
}

INLINE void transform4(__m256i x[8], int shift) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i low[4], high[4];
    half4(low, _mm256_unpacklo_epi16(zero, x[0]), pairs_low(x[2], x[6]),
          pairs_low(x[1], x[3]), pairs_low(x[5], x[7]), shift);
    half4(high, _mm256_unpackhi_epi16(zero, x[0]), pairs_high(x[2], x[6]),
          pairs_high(x[1], x[3]), pairs_high(x[5], x[7]), shift);
    for (int i = 0; i < 4; i++) x[i] = _mm256_packs_epi32(low[i], high[i]);
}

INLINE void block_pair4(uint8_t *dst, size_t stride, const int16_t *dc, const int16_t *left,
                        const int16_t *right, const uint16_t *quant, int level) {
    __m256i x[8];
    load_pair(x, dc, left, right, quant, level);
    transform4(x, 12);
    for (int i = 4; i < 8; i++) x[i] = _mm256_setzero_si256();
    transpose(x);
    transform4(x, 19);
    __m256i c01 = _mm256_unpacklo_epi16(x[0], x[1]), c23 = _mm256_unpacklo_epi16(x[2], x[3]);
    __m256i rows = _mm256_packs_epi16(_mm256_unpacklo_epi32(c01, c23),
                                      _mm256_unpackhi_epi32(c01, c23));
    rows = _mm256_xor_si256(rows, _mm256_set1_epi8((char)0x80));
    uint8_t bytes[32];
    _mm256_storeu_si256((__m256i *)bytes, rows);
    for (int y = 0; y < 4; y++, dst += stride) {
        memcpy(dst, bytes + 4 * y, 4);
        memcpy(dst + 4, bytes + 16 + 4 * y, 4);
    }
}

/* 8 coefficients to 2 samples down the columns, then each of the two rows to 2 samples. */
INLINE void block_pair2(uint8_t *dst, size_t stride, const int16_t *dc, const int16_t *left,
                        const int16_t *right, const uint16_t *quant, int level) {
    const __m256i zero = _mm256_setzero_si256(), round = _mm256_set1_epi32(1 << 12);
    const __m256i weights = _mm256_setr_epi16(0, 29692, 0, -10426, 0, 6967, 0, -5906, 0, 29692, 0,
                                              -10426, 0, 6967, 0, -5906);
    __m256i x[8], plus[2], minus[2];
    load_pair(x, dc, left, right, quant, level);
    for (int i = 0; i < 2; i++) {
        pairs in13 = i ? pairs_high(x[1], x[3]) : pairs_low(x[1], x[3]);
        pairs in57 = i ? pairs_high(x[5], x[7]) : pairs_low(x[5], x[7]);
        __m256i in0 = i ? _mm256_unpackhi_epi16(zero, x[0]) : _mm256_unpacklo_epi16(zero, x[0]);
        __m256i even = add(_mm256_srai_epi32(in0, 1), round);
        __m256i odd = dot(in13, 29692, -10426);
        if (level != LEVEL_LOW) odd = add(odd, dot(in57, 6967, -5906));
        plus[i] = _mm256_srai_epi32(add(even, odd), 13);
        minus[i] = _mm256_srai_epi32(sub(even, odd), 13);
    }
    __m256i top = _mm256_packs_epi32(plus[0], plus[1]),
        bottom = _mm256_packs_epi32(minus[0], minus[1]);
    __m256i odd = _mm256_hadd_epi32(_mm256_madd_epi16(top, weights),
                                    _mm256_madd_epi16(bottom, weights));
    odd = _mm256_hadd_epi32(odd, odd);
    __m256i even = _mm256_unpacklo_epi32(_mm256_slli_epi32(top, 16), _mm256_slli_epi32(bottom, 16));
    even = add(_mm256_srai_epi32(even, 1), _mm256_set1_epi32(1 << 19));
    __m256i samples = _mm256_unpacklo_epi32(_mm256_srai_epi32(add(even, odd), 20),
                                            _mm256_srai_epi32(sub(even, odd), 20));
    samples = _mm256_packs_epi32(samples, samples);
    samples = _mm256_xor_si256(_mm256_packs_epi16(samples, samples), _mm256_set1_epi8((char)0x80));
    uint32_t two[2] = {(uint32_t)_mm256_extract_epi32(samples, 0),
                       (uint32_t)_mm256_extract_epi32(samples, 4)};
    uint32_t rows[2] = {(two[0] & 0xFFFF) | two[1] << 16, two[0] >> 16 | (two[1] & 0xFFFF0000)};
    memcpy(dst, &rows[0], 4);
    memcpy(dst + stride, &rows[1], 4);
}

/* Coefficients whose row and column the 2x2 transform looks at: 0, 1, 3, 5 and 7 of each. */
#define USED_BY_2X2 UINT64_C(0xEA550AA81AA05429)

INLINE void block_pair_reduced(uint8_t *dst, size_t stride, const int16_t *dc, const int16_t *left,
                               const int16_t *right, const uint16_t *quant, int level, int size) {
    if (size == 4)
        block_pair4(dst, stride, dc, left, right, quant, level);
    else
        block_pair2(dst, stride, dc, left, right, quant, level);
}

/* Reduced transforms, two blocks at a time; may write one block more than asked, as idct8 does. The
 * 16 lowest coefficients lie in rows 0 to 4 (LEVEL_LOW). */
INLINE void reduced(PCR_IDCT_PARAMETERS, int size) {
    static const int16_t zeros[64] __attribute__((aligned(64)));
    const uint64_t used = size == 2 ? USED_BY_2X2 : ~UINT64_C(0);
    for (int i = 0; i < count; i += 2, dst += 2 * size, ac += 128) {
        bool two = i + 1 < count;
        uint64_t mask1 = two ? mask[i + 1] : 0, either = (mask[i] | mask1) & used;
        const int16_t pair_dc[2] = {dc[i], two ? dc[i + 1] : 0};
        if (either) {
            const int16_t *left = mask[i] ? ac : zeros, *right = mask1 ? ac + 64 : zeros;
            if ((either & (~UINT64_C(0) >> 16)) == 0)
                block_pair_reduced(dst, stride, pair_dc, left, right, quant, LEVEL_LOW, size);
            else
                block_pair_reduced(dst, stride, pair_dc, left, right, quant, LEVEL_FULL, size);
            continue;
        }
        for (int y = 0; y < size; y++) {
            memset(dst + (size_t)y * stride, pcr_flat_sample(pair_dc[0], quant[0]), (size_t)size);
            memset(dst + (size_t)y * stride + size, pcr_flat_sample(pair_dc[1], quant[0]),
                   (size_t)size);
        }
    }
}

void pcr_idct4_avx2(PCR_IDCT_PARAMETERS) { reduced(dst, stride, dc, mask, ac, quant, count, 4); }

void pcr_idct2_avx2(PCR_IDCT_PARAMETERS) { reduced(dst, stride, dc, mask, ac, quant, count, 2); }

PCR_AVX2_END
#endif
