/* The bit primitives of entropy_body.h without pdep. */
#ifndef PCR_ENTROPY_PLAIN_H
#define PCR_ENTROPY_PLAIN_H

#include <stdint.h>

/* The first coefficient in the lowest bit, so that clearing it takes two instructions. */
typedef uint64_t pcr_zeros;

static inline uint64_t pcr_reverse(uint64_t x) {
#if defined(__aarch64__)
    __asm__("rbit %0, %0" : "+r"(x));
    return x;
#else
    x = (x >> 1 & UINT64_C(0x5555555555555555)) | (x & UINT64_C(0x5555555555555555)) << 1;
    x = (x >> 2 & UINT64_C(0x3333333333333333)) | (x & UINT64_C(0x3333333333333333)) << 2;
    x = (x >> 4 & UINT64_C(0x0F0F0F0F0F0F0F0F)) | (x & UINT64_C(0x0F0F0F0F0F0F0F0F)) << 4;
    return __builtin_bswap64(x);
#endif
}

static inline pcr_zeros pcr_walk_zeros(uint64_t zeros) { return pcr_reverse(zeros); }

static inline uint64_t pcr_next_zero(pcr_zeros *zeros, int step) {
    uint64_t left = *zeros;
    for (; step > 1; step--) left &= left - 1;
    if (!left) return 0;
    *zeros = left & (left - 1);
    return UINT64_C(1) << 63 >> __builtin_ctzll(left);
}

static inline void pcr_correct(int16_t *block, uint64_t bits, uint64_t old, int16_t step) {
    for (; bits; bits >>= 1, old &= old - 1) {
        int16_t *value = &block[63 - __builtin_ctzll(old)];
        int change = *value < 0 ? -step : step;
        *value = (int16_t)(*value + (bits & 1 ? change : 0));
    }
}

static inline uint64_t pcr_extract(uint64_t bits, uint64_t mask) {
    uint64_t found = 0;
    for (uint64_t place = 1; mask; mask &= mask - 1, place <<= 1)
        if (bits & mask & -mask) found |= place;
    return found;
}

#endif
