/* Upsampling and color conversion with AVX2; the same results as pixels_portable.c.
 *
 * Reads up to 32 samples beyond the row (rows have room) but writes only what was asked for.
 */
#include "pixels.h"

#if PCR_HAVE_VECTORS
#include "avx2.h"

PCR_AVX2_BEGIN

#define INLINE static inline __attribute__((always_inline))

#include "products.h"

INLINE __m256i widen(const uint8_t *p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}

INLINE __m256i triple(__m256i x) { return _mm256_add_epi16(x, _mm256_slli_epi16(x, 1)); }

/* 16-bit even and odd samples, each 0..255, to 32 bytes. */
INLINE void store_pairs(uint8_t *dst, __m256i even, __m256i odd, int samples) {
    __m256i both = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
    if (PCR_LIKELY(samples >= 32)) {
        _mm256_storeu_si256((__m256i *)dst, both);
        return;
    }
    uint8_t tail[32];
    _mm256_storeu_si256((__m256i *)tail, both);
    memcpy(dst, tail, (size_t)samples);
}

void pcr_up_h2v1_avx2(PCR_UPSAMPLE_PARAMETERS) {
    (void)far, (void)below;
    const __m256i one = _mm256_set1_epi16(1), two = _mm256_set1_epi16(2);
    for (int i = 0; i < count; i += 16) {
        __m256i x = triple(widen(near + i));
        __m256i even = _mm256_add_epi16(_mm256_add_epi16(x, widen(near + i - 1)), one);
        __m256i odd = _mm256_add_epi16(_mm256_add_epi16(x, widen(near + i + 1)), two);
        store_pairs(dst + 2 * i, _mm256_srli_epi16(even, 2), _mm256_srli_epi16(odd, 2),
                    2 * (count - i));
    }
}

INLINE __m256i vertical(const uint8_t *near, const uint8_t *far) {
    return _mm256_add_epi16(triple(widen(near)), widen(far));
}

void pcr_up_h2v2_avx2(PCR_UPSAMPLE_PARAMETERS) {
    (void)below;
    const __m256i seven = _mm256_set1_epi16(7), eight = _mm256_set1_epi16(8);
    for (int i = 0; i < count; i += 16) {
        __m256i x = triple(vertical(near + i, far + i));
        __m256i even = _mm256_add_epi16(_mm256_add_epi16(x, vertical(near + i - 1, far + i - 1)),
                                        eight);
        __m256i odd = _mm256_add_epi16(_mm256_add_epi16(x, vertical(near + i + 1, far + i + 1)),
                                       seven);
        store_pairs(dst + 2 * i, _mm256_srli_epi16(even, 4), _mm256_srli_epi16(odd, 4),
                    2 * (count - i));
    }
}

void pcr_up_h1v2_avx2(PCR_UPSAMPLE_PARAMETERS) {
    const __m256i bias = _mm256_set1_epi16(below ? 2 : 1);
    for (int i = 0; i < count; i += 16) {
        __m256i sum = _mm256_srli_epi16(_mm256_add_epi16(vertical(near + i, far + i), bias), 2);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(sum, sum), 0xD8);
        uint8_t tail[16];
        bool whole = count - i >= 16;
        _mm_storeu_si128((__m128i *)(whole ? dst + i : tail), _mm256_castsi256_si128(bytes));
        if (!whole) memcpy(dst + i, tail, (size_t)(count - i));
    }
}

/* 16 pixels, 16 bits wide. The constants above 1 or 0.5 are split so that they fit 16 bits with the
 * same rounding as jdcolor.c's tables: R-Y = Cr + 0.402 Cr, B-Y = 2 Cb - 0.228 Cb,
 * G-Y = -0.344 Cb + 0.286 Cr - Cr. */
INLINE void ycc_pixels(__m256i y, __m256i cb, __m256i cr, __m256i rgb[3]) {
    const __m256i center = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
    const __m256i half = _mm256_set1_epi32(32768);
    cb = _mm256_sub_epi16(cb, center), cr = _mm256_sub_epi16(cr, center);
    __m256i r = _mm256_mulhi_epi16(_mm256_add_epi16(cr, cr), _mm256_set1_epi16(26345));
    __m256i b = _mm256_mulhi_epi16(_mm256_add_epi16(cb, cb), _mm256_set1_epi16(-14942));
    r = _mm256_add_epi16(_mm256_srai_epi16(_mm256_add_epi16(r, one), 1), cr);
    b = _mm256_add_epi16(_mm256_srai_epi16(_mm256_add_epi16(b, one), 1), _mm256_add_epi16(cb, cb));
    __m256i low = _mm256_add_epi32(dot(pairs_low(cb, cr), -22554, 18734), half);
    __m256i high = _mm256_add_epi32(dot(pairs_high(cb, cr), -22554, 18734), half);
    __m256i g = _mm256_packs_epi32(_mm256_srai_epi32(low, 16), _mm256_srai_epi32(high, 16));
    rgb[0] = _mm256_add_epi16(y, r);
    rgb[1] = _mm256_add_epi16(y, _mm256_sub_epi16(g, cr));
    rgb[2] = _mm256_add_epi16(y, b);
}

/* 32 pixels of each channel as bytes, in order. */
INLINE void ycc_bytes(const uint8_t *const *src, int i, __m256i rgb[3]) {
    __m256i first[3], second[3];
    ycc_pixels(widen(src[0] + i), widen(src[1] + i), widen(src[2] + i), first);
    ycc_pixels(widen(src[0] + i + 16), widen(src[1] + i + 16), widen(src[2] + i + 16), second);
    for (int c = 0; c < 3; c++)
        rgb[c] = _mm256_permute4x64_epi64(_mm256_packus_epi16(first[c], second[c]), 0xD8);
}

/* Three times 16 bytes r, g, b to 48 interleaved ones. */
INLINE void interleave16(uint8_t *dst, __m128i r, __m128i g, __m128i b) {
#if defined(__aarch64__)
    const int8x16x3_t rgb = {{r, g, b}};
    vst3q_s8((int8_t *)dst, rgb);
#else
#define N (char)0x80
    const __m128i r0 = _mm_setr_epi8(0, N, N, 1, N, N, 2, N, N, 3, N, N, 4, N, N, 5);
    const __m128i g0 = _mm_setr_epi8(N, 0, N, N, 1, N, N, 2, N, N, 3, N, N, 4, N, N);
    const __m128i b0 = _mm_setr_epi8(N, N, 0, N, N, 1, N, N, 2, N, N, 3, N, N, 4, N);
    const __m128i r1 = _mm_setr_epi8(N, N, 6, N, N, 7, N, N, 8, N, N, 9, N, N, 10, N);
    const __m128i g1 = _mm_setr_epi8(5, N, N, 6, N, N, 7, N, N, 8, N, N, 9, N, N, 10);
    const __m128i b1 = _mm_setr_epi8(N, 5, N, N, 6, N, N, 7, N, N, 8, N, N, 9, N, N);
    const __m128i r2 = _mm_setr_epi8(N, 11, N, N, 12, N, N, 13, N, N, 14, N, N, 15, N, N);
    const __m128i g2 = _mm_setr_epi8(N, N, 11, N, N, 12, N, N, 13, N, N, 14, N, N, 15, N);
    const __m128i b2 = _mm_setr_epi8(10, N, N, 11, N, N, 12, N, N, 13, N, N, 14, N, N, 15);
#undef N
#define MIX(i) \
    _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r##i), _mm_shuffle_epi8(g, g##i)), \
                 _mm_shuffle_epi8(b, b##i))
    _mm_storeu_si128((__m128i *)dst, MIX(0));
    _mm_storeu_si128((__m128i *)(dst + 16), MIX(1));
    _mm_storeu_si128((__m128i *)(dst + 32), MIX(2));
#undef MIX
#endif
}

INLINE void interleave32(uint8_t *dst, const __m256i rgb[3], int pixels) {
    uint8_t tail[96], *to = pixels >= 32 ? dst : tail;
    interleave16(to, _mm256_castsi256_si128(rgb[0]), _mm256_castsi256_si128(rgb[1]),
                 _mm256_castsi256_si128(rgb[2]));
    interleave16(to + 48, _mm256_extracti128_si256(rgb[0], 1), _mm256_extracti128_si256(rgb[1], 1),
                 _mm256_extracti128_si256(rgb[2], 1));
    if (PCR_UNLIKELY(pixels < 32)) memcpy(dst, tail, 3 * (size_t)pixels);
}

void pcr_ycc_rgb_hwc_avx2(PCR_COLOR_PARAMETERS) {
    for (int i = 0; i < count; i += 32) {
        __m256i rgb[3];
        ycc_bytes(src, i, rgb);
        interleave32(dst[0] + 3 * (size_t)i, rgb, count - i);
    }
}

void pcr_ycc_rgb_chw_avx2(PCR_COLOR_PARAMETERS) {
    for (int i = 0; i < count; i += 32) {
        __m256i rgb[3];
        uint8_t tail[32];
        ycc_bytes(src, i, rgb);
        for (int c = 0; c < 3; c++) {
            bool whole = count - i >= 32;
            _mm256_storeu_si256((__m256i *)(whole ? dst[c] + i : tail), rgb[c]);
            if (!whole) memcpy(dst[c] + i, tail, (size_t)(count - i));
        }
    }
}

void pcr_interleave3_avx2(PCR_COLOR_PARAMETERS) {
    for (int i = 0; i < count; i += 32) {
        __m256i rgb[3];
        for (int c = 0; c < 3; c++) rgb[c] = _mm256_loadu_si256((const __m256i *)(src[c] + i));
        interleave32(dst[0] + 3 * (size_t)i, rgb, count - i);
    }
}

PCR_AVX2_END
#endif
