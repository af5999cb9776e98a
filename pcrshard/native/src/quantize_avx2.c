/* The error-bounded quantizer, 32 values at a time. The codes are those of the portable kernel. */
#include "quantize.h"

#include "avx2.h"

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN

enum { STEP = 32 };

/* Eight codes as int32; 128 and -128 stand for an escape. max_ps and min_ps give their second
 * operand if one is NaN, so that NaN survives the first and becomes 128 in the second. */
static inline __m256i eight_codes(__m256 value, __m256 gain, __m256 offset, __m256 scale,
                                  __m256 low, __m256 high) {
    __m256 d = _mm256_add_ps(_mm256_mul_ps(value, gain), offset);
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), d);
    __m256 positive = _mm256_cmp_ps(magnitude, _mm256_setzero_ps(), _CMP_GT_OQ);
    __m256 least = _mm256_and_ps(positive, _mm256_set1_ps(1));
    __m256 code = _mm256_ceil_ps(_mm256_mul_ps(magnitude, scale));
    code = _mm256_min_ps(_mm256_max_ps(least, code), _mm256_set1_ps(128));
    __m256i codes = _mm256_cvtps_epi32(code);
    __m256i beyond = _mm256_cmpgt_epi32(codes, _mm256_set1_epi32(PCR_MAX_CODE));
    codes = _mm256_blendv_epi8(codes, _mm256_set1_epi32(128), beyond);
    codes = _mm256_sign_epi32(codes, _mm256_castps_si256(d));
    __m256i is_low = _mm256_castps_si256(_mm256_cmp_ps(value, low, _CMP_EQ_OQ));
    codes = _mm256_blendv_epi8(codes, _mm256_set1_epi32(-PCR_EXTREME), is_low);
    __m256i is_high = _mm256_castps_si256(_mm256_cmp_ps(value, high, _CMP_EQ_OQ));
    return _mm256_blendv_epi8(codes, _mm256_set1_epi32(PCR_EXTREME), is_high);
}

/* 32 int32 to bytes; 128 and -128 both become PCR_ESCAPE. Returns how many there are. */
static inline size_t store_codes(const __m256i parts[4], int8_t *codes) {
    const __m256i byte = _mm256_set1_epi16(0xFF);
    __m256i low = _mm256_and_si256(_mm256_packs_epi32(parts[0], parts[1]), byte);
    __m256i high = _mm256_and_si256(_mm256_packs_epi32(parts[2], parts[3]), byte);
    __m256i mixed = _mm256_packus_epi16(low, high);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i all = _mm256_permutevar8x32_epi32(mixed, order);
    __m256i escapes = _mm256_cmpeq_epi8(all, _mm256_set1_epi8(PCR_ESCAPE));
    _mm256_storeu_si256((__m256i *)codes, all);
    return (size_t)_mm_popcnt_u32((uint32_t)_mm256_movemask_epi8(escapes));
}

static inline __m256 load(const void *values, int is_half, size_t i) {
    if (!is_half) return _mm256_loadu_ps((const float *)values + i);
    const __m128i *halves = (const __m128i *)((const uint16_t *)values + i);
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline __attribute__((always_inline)) size_t quantize(
    const void *values, int is_half, size_t across, size_t count, const pcr_coding *how,
    int8_t *codes) {
    const __m256 scale = _mm256_set1_ps(how->scale);
    const __m256 low = _mm256_set1_ps(how->low), high = _mm256_set1_ps(how->high);
    __m256 gain = _mm256_set1_ps(how->gains[0]), offset = _mm256_set1_ps(how->offsets[0]);
    size_t escapes = 0, i = 0;
    for (; i + STEP <= count; i += STEP) {
        __m256i parts[4];
        for (int k = 0; k < 4; k++) {
            size_t at = i + 8 * k;
            if (across) {
                gain = _mm256_loadu_ps(how->gains + at);
                offset = _mm256_loadu_ps(how->offsets + at);
            }
            parts[k] = eight_codes(load(values, is_half, at), gain, offset, scale, low, high);
        }
        escapes += store_codes(parts, codes + i);
    }
    return escapes + pcr_quantize_portable(values, is_half ? PCR_BFLOAT16 : PCR_FLOAT32, i, count,
                                           how, codes);
}

size_t pcr_quantize_avx2(const void *values, int type, size_t count, const pcr_coding *how,
                         int8_t *codes) {
    if (type == PCR_BFLOAT16)
        return how->across ? quantize(values, 1, 1, count, how, codes)
                           : quantize(values, 1, 0, count, how, codes);
    return how->across ? quantize(values, 0, 1, count, how, codes)
                       : quantize(values, 0, 0, count, how, codes);
}

static inline __attribute__((always_inline)) size_t range_of(const void *values, int is_half,
                                                             size_t count, float *range) {
    __m256 low[4], high[4];
    float ends[8];
    size_t i = 0;
    for (int k = 0; k < 4; k++)
        low[k] = _mm256_set1_ps(range[0]), high[k] = _mm256_set1_ps(range[1]);
    for (; i + STEP <= count; i += STEP)
        for (int k = 0; k < 4; k++) {
            __m256 some = load(values, is_half, i + 8 * k);
            low[k] = _mm256_min_ps(some, low[k]);
            high[k] = _mm256_max_ps(some, high[k]);
        }
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_ps(ends, low[k]);
        for (int j = 0; j < 8; j++) range[0] = fminf(range[0], ends[j]);
        _mm256_storeu_ps(ends, high[k]);
        for (int j = 0; j < 8; j++) range[1] = fmaxf(range[1], ends[j]);
    }
    return i;
}

size_t pcr_range_avx2(const void *values, int type, size_t count, float *range) {
    return type == PCR_BFLOAT16 ? range_of(values, 1, count, range)
                                : range_of(values, 0, count, range);
}

PCR_AVX2_END
#endif
