/* Block smoothing with AVX2, 16 blocks at once: the same estimates as smooth_portable.c.
 *
 * DCs are below PCR_SMOOTH_LARGEST here, so that 12 of them add up in 16 bits.
 */
#include "smooth.h"

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN

#define INLINE static inline __attribute__((always_inline))
#define PAIR(a, b) \
    _mm256_set1_epi32((int32_t)((uint32_t)(uint16_t)(int16_t)(a) | (uint32_t)(b) << 16))

/* Two vectors of 16 bits interleaved, or a vector of 32 bits: its elements 0-3 and 8-11, 4-7 and
 * 12-15. */
typedef struct {
    __m256i low, high;
} wide;

/* A row of DCs, and of its neighbors' sums and differences, left less right. */
typedef struct {
    __m256i center, near_sum, near_step, far_sum, far_step;
} row;

INLINE __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
INLINE __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); }
INLINE __m256i load(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE row load_row(const int16_t *p) {
    return (row){.center = load(p),
                 .near_sum = add(load(p - 1), load(p + 1)),
                 .near_step = sub(load(p - 1), load(p + 1)),
                 .far_sum = add(load(p - 2), load(p + 2)),
                 .far_step = sub(load(p - 2), load(p + 2))};
}

INLINE wide pair(__m256i a, __m256i b) {
    return (wide){_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
}

INLINE wide weigh(wide p, __m256i weights) {
    return (wide){_mm256_madd_epi16(p.low, weights), _mm256_madd_epi16(p.high, weights)};
}

INLINE wide plus(wide a, wide b) {
    return (wide){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

INLINE __m256i estimate_half(__m256i sum, const pcr_smoothing *how, int k) {
    __m256 size = _mm256_cvtepi32_ps(_mm256_abs_epi32(sum));
    size = _mm256_add_ps(_mm256_mul_ps(size, _mm256_set1_ps(how->slope[k])),
                         _mm256_set1_ps(how->offset[k]));
    __m256i whole = _mm256_cvttps_epi32(size);
    /* Nothing is known of what is blended. */
    if (!how->blend) whole = _mm256_min_epi32(whole, _mm256_set1_epi32(how->limit[k]));
    return _mm256_sign_epi32(whole, sum);
}

INLINE __m256i estimate(wide sum, const pcr_smoothing *how, int k) {
    return _mm256_packs_epi32(estimate_half(sum.low, how, k), estimate_half(sum.high, how, k));
}

INLINE void blend(const pcr_smoothing *how, int at, __m256i out[PCR_SMOOTHED]) {
    const row a = load_row(how->rows[0] + at), b = load_row(how->rows[1] + at),
              c = load_row(how->rows[2] + at), d = load_row(how->rows[3] + at),
              e = load_row(how->rows[4] + at);
    const wide here = pair(c.center, c.near_sum);
    const wide beside = pair(add(b.center, d.center), add(b.near_sum, d.near_sum));
    const wide ends = pair(add(a.center, e.center), c.far_sum);
    const wide corners = pair(add(add(b.far_sum, d.far_sum), add(a.near_sum, e.near_sum)),
                              add(a.far_sum, e.far_sum));
    const wide across = pair(c.near_step, add(b.near_step, d.near_step));
    const wide far_across = pair(add(add(a.near_step, e.near_step), add(a.far_step, e.far_step)),
                                 add(c.far_step, add(b.far_step, d.far_step)));
    const wide down = pair(sub(b.center, d.center), sub(b.near_sum, d.near_sum));
    const wide far_down = pair(add(sub(b.far_sum, d.far_sum), sub(a.far_sum, e.far_sum)),
                               add(sub(a.center, e.center), sub(a.near_sum, e.near_sum)));
    const wide twist = pair(sub(b.near_step, d.near_step), sub(a.far_step, e.far_step));
    out[0] = estimate(plus(plus(weigh(here, PAIR(152, 42)), weigh(beside, PAIR(42, 6))),
                           plus(weigh(ends, PAIR(-8, -8)), weigh(corners, PAIR(-6, -2)))),
                      how, 0);
    out[1] = estimate(plus(weigh(across, PAIR(38, 13)), weigh(far_across, PAIR(-1, -3))), how, 1);
    out[2] = estimate(plus(weigh(down, PAIR(38, 13)), weigh(far_down, PAIR(-1, -3))), how, 2);
    out[3] = estimate(plus(plus(weigh(here, PAIR(-14, -5)), weigh(beside, PAIR(7, 2))),
                           weigh(ends, PAIR(1, 0))),
                      how, 3);
    out[4] = estimate(weigh(twist, PAIR(9, -1)), how, 4);
    out[5] = estimate(plus(plus(weigh(here, PAIR(-14, 7)), weigh(beside, PAIR(-5, 2))),
                           weigh(ends, PAIR(0, 1))),
                      how, 5);
    out[6] = estimate(weigh(across, PAIR(2, 1)), how, 6);
    out[7] = estimate(weigh(down, PAIR(-3, 1)), how, 7);
    out[8] = estimate(weigh(across, PAIR(-3, 1)), how, 8);
    out[9] = estimate(weigh(down, PAIR(2, 1)), how, 9);
}

INLINE void predict(const pcr_smoothing *how, int at, __m256i out[PCR_SMOOTHED]) {
    const row a = load_row(how->rows[0] + at), b = load_row(how->rows[1] + at),
              c = load_row(how->rows[2] + at), d = load_row(how->rows[3] + at),
              e = load_row(how->rows[4] + at);
    const wide ends = pair(add(a.center, e.center), c.far_sum);
    const wide across = pair(c.near_step, c.far_step);
    const wide down = pair(sub(b.center, d.center), sub(a.center, e.center));
    const wide upright = pair(add(b.center, d.center), c.center);
    const wide sideways = pair(c.near_sum, c.center);
    const wide twist = pair(sub(b.near_step, d.near_step), add(sub(b.far_step, d.far_step),
                                                               sub(a.near_step, e.near_step)));
    out[0] = c.center;
    out[1] = estimate(weigh(across, PAIR(50, -7)), how, 1);
    out[2] = estimate(weigh(down, PAIR(50, -7)), how, 2);
    out[3] = estimate(plus(weigh(upright, PAIR(13, -24)), weigh(ends, PAIR(-1, 0))), how, 3);
    out[4] = estimate(weigh(twist, PAIR(10, -1)), how, 4);
    out[5] = estimate(plus(weigh(sideways, PAIR(13, -24)), weigh(ends, PAIR(0, -1))), how, 5);
    for (int k = 6; k < PCR_SMOOTHED; k++) out[k] = _mm256_setzero_si256();
}

#include "transpose_avx2.h"

/* 8 coefficients of each of 16 blocks, which lie in x as transpose() leaves them. */
INLINE void put_eight(int16_t *ac, const __m256i x[8]) {
    for (int i = 0; i < 8; i++) {
        _mm_store_si128((__m128i *)(ac + 64 * i), _mm256_castsi256_si128(x[i]));
        _mm_store_si128((__m128i *)(ac + 64 * (i + 8)), _mm256_extracti128_si256(x[i], 1));
    }
}

/* The estimates as the first 16 coefficients of each block. */
INLINE void scatter(int16_t *ac, const __m256i in[PCR_SMOOTHED]) {
    const __m256i zero = _mm256_setzero_si256();
    const wide pairs = pair(in[8], in[9]);
    const __m256i two[4] = {
        _mm256_unpacklo_epi32(pairs.low, zero), _mm256_unpackhi_epi32(pairs.low, zero),
        _mm256_unpacklo_epi32(pairs.high, zero), _mm256_unpackhi_epi32(pairs.high, zero)};
    __m256i x[8] = {zero, in[1], in[2], in[3], in[4], in[5], in[6], in[7]};
    transpose(x);
    put_eight(ac, x);
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm256_unpacklo_epi64(two[i], zero);
        x[2 * i + 1] = _mm256_unpackhi_epi64(two[i], zero);
    }
    put_eight(ac + 8, x);
}

INLINE void put_masks(uint64_t *mask, const __m256i in[PCR_SMOOTHED]) {
    __m256i any = in[1];
    int16_t none[16];
    for (int k = 2; k < PCR_SMOOTHED; k++) any = _mm256_or_si256(any, in[k]);
    _mm256_storeu_si256((__m256i *)none, _mm256_cmpeq_epi16(any, _mm256_setzero_si256()));
    for (int i = 0; i < 16; i += 4) {
        __m256i zero = _mm256_cvtepi16_epi64(_mm_loadl_epi64((const __m128i *)(none + i)));
        __m256i bits = _mm256_set1_epi64x((int64_t)PCR_SMOOTHED_AC);
        _mm256_storeu_si256((__m256i *)(mask + i), _mm256_andnot_si256(zero, bits));
    }
}

/* Coefficients that are known replace the estimates. */
INLINE void put_known(const pcr_smoothing *how, int count, const uint64_t *mask,
                      const int16_t *ac) {
    static const int16_t zeros[64] __attribute__((aligned(64)));
    __m256i *to = (__m256i *)how->ac;
    for (int i = 0; i < count; i++, ac += 64, to += 4) {
        const __m256i *from = (const __m256i *)(mask[i] ? ac : zeros);
        __m256i first = _mm256_load_si256(from);
        __m256i unknown = _mm256_cmpeq_epi16(first, _mm256_setzero_si256());
        first = _mm256_blendv_epi8(first, _mm256_load_si256(to), unknown);
        _mm256_store_si256(to, first);
        for (int k = 1; k < 4 && how->wide; k++)
            _mm256_store_si256(to + k, _mm256_load_si256(from + k));
        how->mask[i] |= mask[i];
    }
}

void pcr_smooth_avx2(PCR_SMOOTH_PARAMETERS) {
    /* A copy that no store can change. */
    const pcr_smoothing plan = *how;
    for (int at = 0; at < count; at += PCR_SMOOTH_CHUNK) {
        __m256i out[PCR_SMOOTHED];
        if (plan.blend)
            blend(&plan, at, out);
        else
            predict(&plan, at, out);
        _mm256_storeu_si256((__m256i *)(plan.dc + at), out[0]);
        put_masks(plan.mask + at, out);
        scatter(plan.ac + 64 * (size_t)at, out);
    }
    if (how->known) put_known(how, count, mask, ac);
}

PCR_AVX2_END
#endif
