/* The resize kernels with AVX2; the same results as those in resize.c. */
#include "resize.h"

#if PCR_HAVE_VECTORS
#include "avx2.h"

PCR_AVX2_BEGIN

#define INLINE static inline __attribute__((always_inline))

/* 32 outputs at a time; dst has room for a multiple of 32. */
INLINE void narrow_row(uint8_t *dst, const uint8_t *src, const pcr_filter *filter,
                       const int pairs) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i *shuffle = (const __m256i *)filter->shuffle,
        *weights = (const __m256i *)filter->lane_weights;
    const int32_t *start = filter->lane_start;
    for (int i = 0; i < filter->out; i += 32) {
        __m256i sum[4];
        for (int group = 0; group < 4; group++, start += 2) {
            __m256i from = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(src + start[0]))),
                _mm_loadu_si128((const __m128i *)(src + start[1])), 1);
            sum[group] = _mm256_set1_epi32(1 << (PCR_WEIGHT_BITS - 1));
            for (int pair = 0; pair < pairs; pair++) {
                __m256i samples = _mm256_shuffle_epi8(from, _mm256_loadu_si256(shuffle++));
                sum[group] = _mm256_add_epi32(
                    sum[group], _mm256_madd_epi16(samples, _mm256_loadu_si256(weights++)));
            }
            sum[group] = _mm256_srai_epi32(sum[group], PCR_WEIGHT_BITS);
        }
        __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]),
                                            _mm256_packs_epi32(sum[2], sum[3]));
        _mm256_storeu_si256((__m256i *)(dst + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
}

static void wide_row(uint8_t *dst, const uint8_t *src, const pcr_filter *filter) {
    const int16_t *weights = filter->weights;
    for (int i = 0; i < filter->out; i++, weights += filter->stride) {
        const uint8_t *from = src + filter->start[i];
        __m256i sum = _mm256_setzero_si256();
        for (int t = 0; t < filter->stride; t += 16) {
            __m256i samples = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(from + t)));
            sum = _mm256_add_epi32(
                sum,
                _mm256_madd_epi16(samples, _mm256_loadu_si256((const __m256i *)(weights + t))));
        }
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
        dst[i] = (uint8_t)(
            (_mm_cvtsi128_si32(four) + (1 << (PCR_WEIGHT_BITS - 1))) >> PCR_WEIGHT_BITS);
    }
}

void pcr_resize_row_avx2(uint8_t *dst, const uint8_t *src, const pcr_filter *filter) {
    /* A known number of taps makes straight code: up to 2 for enlarging, 4 down to a half. */
    if (!filter->narrow)
        wide_row(dst, src, filter);
    else if (filter->stride == 2)
        narrow_row(dst, src, filter, 1);
    else if (filter->stride == 4)
        narrow_row(dst, src, filter, 2);
    else
        narrow_row(dst, src, filter, filter->stride / 2);
}

/* 32 samples of a column pass, reading rows in pairs: the weights, too, are an even number. */
INLINE __m256i column32(const uint8_t *src, size_t stride, const int16_t *weights, int taps) {
    __m256i sum[4];
    for (int i = 0; i < 4; i++) sum[i] = _mm256_set1_epi32(1 << (PCR_WEIGHT_BITS - 1));
    for (int t = 0; t < taps; t += 2, src += 2 * stride) {
        bool two = t + 1 < taps;
        int32_t pair;
        memcpy(&pair, weights + t, 4);
        __m256i weight = _mm256_set1_epi32(pair), zero = _mm256_setzero_si256();
        __m256i a = _mm256_loadu_si256((const __m256i *)src);
        __m256i b = _mm256_loadu_si256((const __m256i *)(two ? src + stride : src));
        __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
        sum[0] = _mm256_add_epi32(sum[0],
                                  _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), weight));
        sum[1] = _mm256_add_epi32(sum[1],
                                  _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), weight));
        sum[2] = _mm256_add_epi32(sum[2],
                                  _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), weight));
        sum[3] = _mm256_add_epi32(sum[3],
                                  _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), weight));
    }
    for (int i = 0; i < 4; i++) sum[i] = _mm256_srai_epi32(sum[i], PCR_WEIGHT_BITS);
    __m256i low = _mm256_packs_epi32(sum[0], sum[1]), high = _mm256_packs_epi32(sum[2], sum[3]);
    return _mm256_packus_epi16(low, high);
}

/* Reads up to 31 samples beyond count, which rows have room for. */
void pcr_resize_column_avx2(uint8_t *dst, const uint8_t *src, size_t stride, const int16_t *weights,
                            int taps, int count) {
    for (int i = 0; i < count; i += 32) {
        __m256i bytes = column32(src + i, stride, weights, taps);
        uint8_t tail[32];
        bool whole = count - i >= 32;
        _mm256_storeu_si256((__m256i *)(whole ? dst + i : tail), bytes);
        if (!whole) memcpy(dst + i, tail, (size_t)(count - i));
    }
}

PCR_AVX2_END
#endif
