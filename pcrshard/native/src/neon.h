/* The AVX2 intrinsics that the vector kernels use, for ARM: a vector of 256 bits is two NEON
 * registers. The results are AVX2's wherever the kernels go; what is undefined here and defined
 * there is said where it is. One source, written in AVX2, thus serves both processors.
 */
#ifndef PCR_NEON_H
#define PCR_NEON_H

#include <arm_neon.h>

#define PCR_NEON static inline __attribute__((always_inline))

typedef int8x16_t __m128i;
typedef struct {
    int8x16_t low, high;
} __m256i;
typedef struct {
    float32x4_t low, high;
} __m256;

/* An operation of one or two vectors, lane by lane: `call` sees a and b as vectors of a type. */
#define PCR_UNARY(name, type, call) \
    PCR_NEON int8x16_t pcr_##name(type a) { return (int8x16_t)(call); } \
    PCR_NEON __m256i _mm256_##name(__m256i x) { \
        return (__m256i){pcr_##name((type)x.low), pcr_##name((type)x.high)}; \
    }
#define PCR_BINARY(name, type, call) \
    PCR_NEON int8x16_t pcr_##name(type a, type b) { return (int8x16_t)(call); } \
    PCR_NEON __m256i _mm256_##name(__m256i x, __m256i y) { \
        return (__m256i){pcr_##name((type)x.low, (type)y.low), \
                         pcr_##name((type)x.high, (type)y.high)}; \
    }
#define PCR_SHIFT(name, type, operator) \
    PCR_NEON __m256i _mm256_##name(__m256i x, int count) { \
        return (__m256i){(int8x16_t)((type)x.low operator count), \
                         (int8x16_t)((type)x.high operator count)}; \
    }
#define PCR_FLOATS(name, call) \
    PCR_NEON float32x4_t pcr_##name(float32x4_t a, float32x4_t b) { return call; } \
    PCR_NEON __m256 _mm256_##name(__m256 x, __m256 y) { \
        return (__m256){pcr_##name(x.low, y.low), pcr_##name(x.high, y.high)}; \
    }

PCR_BINARY(add_epi16, int16x8_t, vaddq_s16(a, b))
PCR_BINARY(add_epi32, int32x4_t, vaddq_s32(a, b))
PCR_BINARY(sub_epi16, int16x8_t, vsubq_s16(a, b))
PCR_BINARY(sub_epi32, int32x4_t, vsubq_s32(a, b))
PCR_BINARY(hadd_epi32, int32x4_t, vpaddq_s32(a, b))
PCR_BINARY(mullo_epi16, int16x8_t, vmulq_s16(a, b))
/* vqdmulh doubles the product; only (-2^15)^2, which it cannot, differs. */
PCR_BINARY(mulhi_epi16, int16x8_t, vshrq_n_s16(vqdmulhq_s16(a, b), 1))
PCR_BINARY(madd_epi16, int16x8_t,
           vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)))
PCR_UNARY(abs_epi32, int32x4_t, vabsq_s32(a))
PCR_BINARY(min_epi32, int32x4_t, vminq_s32(a, b))
PCR_BINARY(and_si256, int8x16_t, vandq_s8(a, b))
PCR_BINARY(cmpgt_epi32, int32x4_t, vcgtq_s32(a, b))
PCR_BINARY(or_si256, int8x16_t, vorrq_s8(a, b))
PCR_BINARY(xor_si256, int8x16_t, veorq_s8(a, b))
PCR_BINARY(andnot_si256, int8x16_t, vbicq_s8(b, a))
PCR_BINARY(cmpeq_epi8, int8x16_t, vceqq_s8(a, b))
PCR_BINARY(cmpeq_epi16, int16x8_t, vceqq_s16(a, b))
PCR_BINARY(packs_epi16, int16x8_t, vqmovn_high_s16(vqmovn_s16(a), b))
PCR_BINARY(packs_epi32, int32x4_t, vqmovn_high_s32(vqmovn_s32(a), b))
PCR_BINARY(packus_epi16, int16x8_t, vqmovun_high_s16(vqmovun_s16(a), b))
PCR_BINARY(unpacklo_epi8, int8x16_t, vzip1q_s8(a, b))
PCR_BINARY(unpackhi_epi8, int8x16_t, vzip2q_s8(a, b))
PCR_BINARY(unpacklo_epi16, int16x8_t, vzip1q_s16(a, b))
PCR_BINARY(unpackhi_epi16, int16x8_t, vzip2q_s16(a, b))
PCR_BINARY(unpacklo_epi32, int32x4_t, vzip1q_s32(a, b))
PCR_BINARY(unpackhi_epi32, int32x4_t, vzip2q_s32(a, b))
PCR_BINARY(unpacklo_epi64, int64x2_t, vzip1q_s64(a, b))
PCR_BINARY(unpackhi_epi64, int64x2_t, vzip2q_s64(a, b))
/* An index is 0 to 15, or has its highest bit set for a zero: others differ from AVX2's. */
PCR_BINARY(shuffle_epi8, int8x16_t, vqtbl1q_s8(a, (uint8x16_t)b))

/* a with the sign of b: 0 where b is 0. */
PCR_NEON int32x4_t pcr_signed(int32x4_t a, int32x4_t b) {
    int32x4_t negative = vshrq_n_s32(b, 31);
    return vandq_s32(vsubq_s32(veorq_s32(a, negative), negative), (int32x4_t)vtstq_s32(b, b));
}
PCR_BINARY(sign_epi32, int32x4_t, pcr_signed(a, b))

PCR_SHIFT(slli_epi16, uint16x8_t, <<)
PCR_SHIFT(slli_epi32, uint32x4_t, <<)
PCR_SHIFT(srli_epi16, uint16x8_t, >>)
PCR_SHIFT(srai_epi16, int16x8_t, >>)
PCR_SHIFT(srai_epi32, int32x4_t, >>)

/* Each byte of the mask is all ones, for b, or all zeros, for a. */
PCR_NEON __m256i _mm256_blendv_epi8(__m256i a, __m256i b, __m256i mask) {
    return (__m256i){vbslq_s8((uint8x16_t)mask.low, b.low, a.low),
                     vbslq_s8((uint8x16_t)mask.high, b.high, a.high)};
}

/* Memory and constants. */
PCR_NEON __m128i _mm_loadu_si128(const __m128i *from) { return vld1q_s8((const int8_t *)from); }
PCR_NEON void _mm_storeu_si128(__m128i *to, __m128i x) { vst1q_s8((int8_t *)to, x); }
PCR_NEON __m128i _mm_loadl_epi64(const __m128i *from) {
    return vcombine_s8(vld1_s8((const int8_t *)from), vdup_n_s8(0));
}
PCR_NEON __m256i _mm256_loadu_si256(const __m256i *from) {
    return (__m256i){vld1q_s8((const int8_t *)from), vld1q_s8((const int8_t *)from + 16)};
}
PCR_NEON void _mm256_storeu_si256(__m256i *to, __m256i x) {
    vst1q_s8((int8_t *)to, x.low), vst1q_s8((int8_t *)to + 16, x.high);
}
#define _mm_load_si128 _mm_loadu_si128
#define _mm_store_si128 _mm_storeu_si128
#define _mm256_load_si256 _mm256_loadu_si256
#define _mm256_store_si256 _mm256_storeu_si256

PCR_NEON __m256i pcr_twice(int8x16_t x) { return (__m256i){x, x}; }
#define _mm256_broadcastsi128_si256(x) pcr_twice(x)
#define _mm256_setzero_si256() pcr_twice(vdupq_n_s8(0))
#define _mm256_set1_epi8(x) pcr_twice(vdupq_n_s8(x))
#define _mm256_set1_epi16(x) pcr_twice((int8x16_t)vdupq_n_s16(x))
#define _mm256_set1_epi32(x) pcr_twice((int8x16_t)vdupq_n_s32(x))
#define _mm256_set1_epi64x(x) pcr_twice((int8x16_t)vdupq_n_s64(x))
#define _mm_setr_epi8(...) ((int8x16_t){__VA_ARGS__})
#define _mm_set_epi64x(high, low) ((int8x16_t)(int64x2_t){low, high})
/* Of macros that each stand for 16 bytes, too. */
#define _mm256_setr_epi8(...) _mm256_loadu_si256((const __m256i *)(const char[32]){__VA_ARGS__})
#define _mm256_setr_epi16(...) _mm256_loadu_si256((const __m256i *)(const int16_t[16]){__VA_ARGS__})
#define _mm256_setr_epi32(...) _mm256_loadu_si256((const __m256i *)(const int32_t[8]){__VA_ARGS__})

/* Parts of vectors. */
#define _mm256_castsi256_si128(x) ((x).low)
#define _mm256_castsi128_si256(x) pcr_twice(x)
#define _mm256_extracti128_si256(x, half) ((half) ? (x).high : (x).low)
PCR_NEON __m256i _mm256_inserti128_si256(__m256i x, __m128i part, int half) {
    return half ? (__m256i){x.low, part} : (__m256i){part, x.high};
}
#define _mm_insert_epi16(x, value, lane) \
    ((int8x16_t)vsetq_lane_s16((int16_t)(value), (int16x8_t)(x), lane))
#define _mm_cvtsi128_si32(x) (((int32x4_t)(x))[0])
#define _mm256_extract_epi32(x, lane) \
    (((int32x4_t)((lane) < 4 ? (x).low : (x).high))[(lane) & 3])
#define _mm_or_si128(a, b) vorrq_s8(a, b)
#define _mm_add_epi32(a, b) ((int8x16_t)vaddq_s32((int32x4_t)(a), (int32x4_t)(b)))
#define _mm_cmpeq_epi8(a, b) ((int8x16_t)vceqq_s8(a, b))
#define _mm_shuffle_epi8(x, order) vqtbl1q_s8(x, (uint8x16_t)(order))
PCR_NEON __m128i _mm_shuffle_epi32(__m128i x, int order) {
    int32x4_t from = (int32x4_t)x;
    return (int8x16_t)(int32x4_t){from[order & 3], from[order >> 2 & 3], from[order >> 4 & 3],
                                  from[order >> 6 & 3]};
}

PCR_NEON int64x1_t pcr_quarter(__m256i x, int which) {
    int64x2_t half = (int64x2_t)(which & 2 ? x.high : x.low);
    return which & 1 ? vget_high_s64(half) : vget_low_s64(half);
}
PCR_NEON __m256i _mm256_permute4x64_epi64(__m256i x, int order) {
    return (__m256i){
        (int8x16_t)vcombine_s64(pcr_quarter(x, order & 3), pcr_quarter(x, order >> 2 & 3)),
        (int8x16_t)vcombine_s64(pcr_quarter(x, order >> 4 & 3), pcr_quarter(x, order >> 6 & 3))};
}
PCR_NEON int8x16_t pcr_eighths(__m256i x, int8x16_t which) {
    const uint8x16x2_t from = {{(uint8x16_t)x.low, (uint8x16_t)x.high}};
    uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), (uint32x4_t)which, 0x04040404);
    return (int8x16_t)vqtbl2q_u8(from, (uint8x16_t)bytes);
}
/* An index is 0 to 7: others differ from AVX2's. */
PCR_NEON __m256i _mm256_permutevar8x32_epi32(__m256i x, __m256i order) {
    return (__m256i){pcr_eighths(x, order.low), pcr_eighths(x, order.high)};
}

/* The highest bit of each byte, the first byte's lowest. */
PCR_NEON uint32_t _mm256_movemask_epi8(__m256i x) {
    const uint64x2_t places = vdupq_n_u64(UINT64_C(0x8040201008040201));
    uint8x16_t low = (uint8x16_t)vshrq_n_s8(x.low, 7), high = (uint8x16_t)vshrq_n_s8(x.high, 7);
    uint8x16_t bits = vpaddq_u8(vandq_u8(low, (uint8x16_t)places),
                                vandq_u8(high, (uint8x16_t)places));
    bits = vpaddq_u8(bits, bits);
    return vgetq_lane_u32((uint32x4_t)vpaddq_u8(bits, bits), 0);
}
#define _mm_popcnt_u32(x) __builtin_popcount(x)

/* Widths. */
PCR_NEON __m256i _mm256_cvtepu8_epi16(__m128i x) {
    uint8x16_t from = (uint8x16_t)x;
    return (__m256i){(int8x16_t)vmovl_u8(vget_low_u8(from)), (int8x16_t)vmovl_high_u8(from)};
}
PCR_NEON __m256i _mm256_cvtepu16_epi32(__m128i x) {
    uint16x8_t from = (uint16x8_t)x;
    return (__m256i){(int8x16_t)vmovl_u16(vget_low_u16(from)), (int8x16_t)vmovl_high_u16(from)};
}
PCR_NEON __m256i _mm256_cvtepi16_epi64(__m128i x) {
    int32x4_t from = vmovl_s16(vget_low_s16((int16x8_t)x));
    return (__m256i){(int8x16_t)vmovl_s32(vget_low_s32(from)), (int8x16_t)vmovl_high_s32(from)};
}

/* Numbers. max and min give b if one is NaN, as AVX's do. */
PCR_FLOATS(add_ps, vaddq_f32(a, b))
PCR_FLOATS(mul_ps, vmulq_f32(a, b))
PCR_FLOATS(max_ps, vbslq_f32(vcgtq_f32(a, b), a, b))
PCR_FLOATS(min_ps, vbslq_f32(vcltq_f32(a, b), a, b))
PCR_FLOATS(and_ps, (float32x4_t)vandq_s8((int8x16_t)a, (int8x16_t)b))
PCR_FLOATS(andnot_ps, (float32x4_t)vbicq_s8((int8x16_t)b, (int8x16_t)a))
PCR_FLOATS(greater_ps, (float32x4_t)vcgtq_f32(a, b))
PCR_FLOATS(equal_ps, (float32x4_t)vceqq_f32(a, b))
#define _CMP_EQ_OQ 0
#define _CMP_GT_OQ 30
#define _mm256_cmp_ps(a, b, how) \
    ((how) == _CMP_GT_OQ ? _mm256_greater_ps(a, b) : _mm256_equal_ps(a, b))
#define _mm256_set1_ps(x) ((__m256){vdupq_n_f32(x), vdupq_n_f32(x)})
#define _mm256_setzero_ps() _mm256_set1_ps(0)
PCR_NEON __m256 _mm256_loadu_ps(const float *from) {
    return (__m256){vld1q_f32(from), vld1q_f32(from + 4)};
}
PCR_NEON void _mm256_storeu_ps(float *to, __m256 x) {
    vst1q_f32(to, x.low), vst1q_f32(to + 4, x.high);
}
#define _mm256_ceil_ps(x) ((__m256){vrndpq_f32((x).low), vrndpq_f32((x).high)})
PCR_NEON __m256i _mm256_castps_si256(__m256 x) {
    return (__m256i){(int8x16_t)x.low, (int8x16_t)x.high};
}
PCR_NEON __m256 _mm256_castsi256_ps(__m256i x) {
    return (__m256){(float32x4_t)x.low, (float32x4_t)x.high};
}
PCR_NEON __m256 _mm256_cvtepi32_ps(__m256i x) {
    return (__m256){vcvtq_f32_s32((int32x4_t)x.low), vcvtq_f32_s32((int32x4_t)x.high)};
}
/* What does not fit 32 bits differs from AVX2's. */
PCR_NEON __m256i _mm256_cvtps_epi32(__m256 x) {
    return (__m256i){(int8x16_t)vcvtnq_s32_f32(x.low), (int8x16_t)vcvtnq_s32_f32(x.high)};
}
PCR_NEON __m256i _mm256_cvttps_epi32(__m256 x) {
    return (__m256i){(int8x16_t)vcvtq_s32_f32(x.low), (int8x16_t)vcvtq_s32_f32(x.high)};
}

#endif
