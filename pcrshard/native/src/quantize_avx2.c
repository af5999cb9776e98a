/* The error-bounded quantizer, 32 values at a time. The codes are those of the portable kernels. */
#include "quantize.h"

#include "avx2.h"

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN

enum { STEP = 32 };

/* Eight codes as int32; 128 stands for an escape. max_ps and min_ps give their second operand if
 * one is NaN, so that NaN survives the first and becomes 128 in the second. */
static inline __m256i eight_codes(__m256 value, __m256 scale) {
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value);
    __m256 positive = _mm256_cmp_ps(magnitude, _mm256_setzero_ps(), _CMP_GT_OQ);
    __m256 least = _mm256_and_ps(positive, _mm256_set1_ps(1));
    __m256 code = _mm256_ceil_ps(_mm256_mul_ps(magnitude, scale));
    code = _mm256_min_ps(_mm256_max_ps(least, code), _mm256_set1_ps(128));
    return _mm256_sign_epi32(_mm256_cvtps_epi32(code), _mm256_castps_si256(value));
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

size_t pcr_quantize_f32_avx2(const float *values, size_t count, float scale, int8_t *codes) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t escapes = 0;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        __m256i parts[4];
        for (int k = 0; k < 4; k++)
            parts[k] = eight_codes(_mm256_loadu_ps(values + i + 8 * k), factor);
        escapes += store_codes(parts, codes + i);
    }
    return escapes + pcr_quantize_f32_portable(values + i, count - i, scale, codes + i);
}

static inline __m256 load_bfloat16(const uint16_t *values) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

size_t pcr_quantize_bf16_avx2(const uint16_t *values, size_t count, float scale, int8_t *codes) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t escapes = 0;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        __m256i parts[4];
        for (int k = 0; k < 4; k++)
            parts[k] = eight_codes(load_bfloat16(values + i + 8 * k), factor);
        escapes += store_codes(parts, codes + i);
    }
    return escapes + pcr_quantize_bf16_portable(values + i, count - i, scale, codes + i);
}

/* (2 q - sign q) step. */
void pcr_dequantize_f32_avx2(const int8_t *codes, size_t count, float step, float *values) {
    const __m256 factor = _mm256_set1_ps(step);
    const __m256i one = _mm256_set1_epi32(1);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256i odd = _mm256_sub_epi32(_mm256_slli_epi32(code, 1), _mm256_sign_epi32(one, code));
        _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_cvtepi32_ps(odd), factor));
    }
    pcr_dequantize_f32_portable(codes + i, count - i, step, values + i);
}

PCR_AVX2_END
#endif
