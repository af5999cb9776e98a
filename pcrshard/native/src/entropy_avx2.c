/* Entropy decoding with BMI2 and AVX2, or on ARM; and the table of the vector kernels. */
#include "pcr_internal.h"

#if PCR_HAVE_VECTORS
#include "idct.h"
#include "pixels.h"
#include "resize.h"
#include "smooth.h"

PCR_AVX2_BEGIN

#define PCR_NAME(x) avx2_##x

/* gcc would make a memset of this size "rep stos", which costs more than decoding some blocks. */
static inline void pcr_clear(int16_t *block) {
    for (int i = 0; i < 4; i++) _mm256_store_si256((__m256i *)block + i, _mm256_setzero_si256());
}

#if defined(__x86_64__)
/* One bit, as many places up as zeros are left: shifted down by `step` and spread over the zeros,
 * it marks the one looked for. */
typedef struct {
    uint64_t cursor, zeros;
} pcr_zeros;

static inline pcr_zeros pcr_walk_zeros(uint64_t zeros) {
    return (pcr_zeros){UINT64_C(1) << __builtin_popcountll(zeros), zeros};
}

static inline uint64_t pcr_next_zero(pcr_zeros *walk, int step) {
    walk->cursor >>= step;
    return PCR_LIKELY(walk->cursor) ? _pdep_u64(walk->cursor, walk->zeros) : 0;
}

/* All 64 coefficients without a branch per coefficient: which ones need correcting is random. */
static inline void pcr_correct(int16_t *block, uint64_t corrections, uint64_t old, int16_t step) {
    const __m256i lanes = _mm256_setr_epi16(-32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128,
                                            64, 32, 16, 8, 4, 2, 1);
    const __m256i steps = _mm256_set1_epi16(step);
    uint64_t which = _pdep_u64(corrections, old);
    for (int group = 0; group < 4; group++, which <<= 16) {
        __m256i *at = (__m256i *)(block + 16 * group);
        __m256i bits = _mm256_set1_epi16((int16_t)(which >> 48));
        __m256i chosen = _mm256_cmpeq_epi16(_mm256_and_si256(bits, lanes), lanes);
        __m256i value = _mm256_load_si256(at);
        __m256i change = _mm256_and_si256(_mm256_sign_epi16(steps, value), chosen);
        _mm256_store_si256(at, _mm256_add_epi16(value, change));
    }
}

static inline uint64_t pcr_extract(uint64_t bits, uint64_t mask) { return _pext_u64(bits, mask); }
#else
#include "entropy_plain.h"
#endif

static inline uint64_t pcr_find(const int16_t *block, uint64_t mask, int shift, int keep) {
    const __m256i kept = _mm256_set1_epi16((int16_t)keep), zero = _mm256_setzero_si256();
    const __m256i backward = _mm256_setr_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0,
                                              15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    uint64_t none = 0;
    if (!mask) return 0;
    for (int half = 0; half < 2; half++, block += 32) {
        __m256i is_zero[2];
        for (int i = 0; i < 2; i++) {
            __m256i value = _mm256_load_si256((const __m256i *)block + i);
            __m256i sign = _mm256_srai_epi16(value, 15);
            value = _mm256_sub_epi16(_mm256_xor_si256(value, sign), sign);
            value = _mm256_and_si256(_mm256_srli_epi16(value, shift), kept);
            is_zero[i] = _mm256_cmpeq_epi16(value, zero);
        }
        /* The first coefficient belongs in the highest bit. */
        __m256i bytes = _mm256_packs_epi16(is_zero[0], is_zero[1]);
        bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, backward), 0x72);
        none = none << 32 | (uint32_t)_mm256_movemask_epi8(bytes);
    }
    return mask & ~none;
}

#include "entropy_body.h"
#include "tokens_body.h"

static size_t avx2_copy_plain(uint8_t *dst, const uint8_t *src, size_t size) {
    const __m256i ff = _mm256_set1_epi8(-1);
    size_t i = 0;
    for (; i + 32 <= size; i += 32) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(src + i));
        uint32_t found = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, ff));
        _mm256_storeu_si256((__m256i *)(dst + i), bytes);
        if (found) return i + (size_t)__builtin_ctz(found);
    }
    for (; i < size && src[i] != 0xFF; i++) dst[i] = src[i];
    return i;
}

PCR_AVX2_END

const pcr_kernels pcr_kernels_vector = {
    .name = "native (" PCR_VECTORS ")",
    .copy_plain = avx2_copy_plain,
    .dc_first = avx2_dc_first,
    .dc_refine = avx2_dc_refine,
    .ac_first = avx2_ac_first,
    .ac_refine = avx2_ac_refine,
    .sequential = avx2_sequential,
    .tokenize = avx2_tokenize,
    .smooth = pcr_smooth_avx2,
    .idct8 = pcr_idct8_avx2,
    .idct4 = pcr_idct4_avx2,
    .idct2 = pcr_idct2_avx2,
    .idct1 = pcr_idct1_portable,
    .up_h2v1 = pcr_up_h2v1_avx2,
    .up_h2v2 = pcr_up_h2v2_avx2,
    .up_h1v2 = pcr_up_h1v2_avx2,
    .ycc_rgb_hwc = pcr_ycc_rgb_hwc_avx2,
    .ycc_rgb_chw = pcr_ycc_rgb_chw_avx2,
    .interleave3 = pcr_interleave3_avx2,
    .resize_row = pcr_resize_row_avx2,
    .resize_column = pcr_resize_column_avx2,
};
#endif
