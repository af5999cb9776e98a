/* The spread of values, and float32 values as codes of a linear lattice. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "avx2.h"
#include "numbers.h"

/* Added to a number below 2^51, it leaves no bits for a fraction: rounds to even, like rint. */
#define ROUNDER 6755399441055744.0
#define MAX_CODE 1073741824.0

#define PARAMETERS \
    const uint32_t *words, size_t count, double step, double error_bound, int32_t *codes, \
        uint32_t *restored
#define ARGUMENTS words, count, step, error_bound, codes, restored

static inline __attribute__((always_inline)) int quantize(PARAMETERS) {
    int escapes = 0;
    for (size_t i = 0; i < count; i++) {
        float narrow;
        memcpy(&narrow, words + i, sizeof narrow);
        double value = narrow, magnitude = fabs(value);
        double code = (value / step + ROUNDER) - ROUNDER;
        float near = (float)(code * step);
        /* Without branches, so that the loop is vectorized. Comparisons with NaN are false. */
        int kept = ((magnitude >= (double)FLT_MIN) & (magnitude <= (double)FLT_MAX)) |
                   (words[i] == 0);
        kept &= (fabs(code) <= MAX_CODE) & (fabs((double)near - value) <= error_bound);
        codes[i] = (int32_t)(kept ? code : 0.0);
        memcpy(restored + i, &near, sizeof near);
        escapes |= !kept;
    }
    return escapes;
}

typedef double lanes __attribute__((vector_size(32)));
typedef int64_t masks __attribute__((vector_size(32)));
enum { LANES = 4, CHAINS = 2 };

static inline __attribute__((always_inline)) void add_moments(const double *values, size_t count,
                                                              double center, double *sums) {
    masks number[CHAINS] = {{0}};
    lanes total[CHAINS] = {{0}}, squares[CHAINS] = {{0}};
    size_t start = 0;
    for (; count - start >= LANES * CHAINS; start += LANES * CHAINS) {
        for (int i = 0; i < CHAINS; i++) {
            lanes value;
            memcpy(&value, values + start + LANES * i, sizeof value);
            value -= center;
            masks is_finite = (masks)(value - value == 0); /* -1 for true */
            value = (lanes)((masks)value & is_finite);
            number[i] -= is_finite;
            total[i] += value;
            squares[i] += value * value;
        }
    }
    for (int i = 0; i < LANES * CHAINS; i++) {
        sums[0] += (double)number[i / LANES][i % LANES];
        sums[1] += total[i / LANES][i % LANES];
        sums[2] += squares[i / LANES][i % LANES];
    }
    for (; start < count; start++) {
        double value = values[start] - center;
        if (!isfinite(value)) continue;
        sums[0] += 1;
        sums[1] += value;
        sums[2] += value * value;
    }
}

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN
static int quantize_avx2(PARAMETERS) { return quantize(ARGUMENTS); }
static void add_moments_avx2(const double *values, size_t count, double center, double *sums) {
    add_moments(values, count, center, sums);
}
PCR_AVX2_END
#endif

int pcr_quantize_linear(PARAMETERS) {
#if PCR_HAVE_VECTORS
    if (pcr_have_vectors()) return quantize_avx2(ARGUMENTS);
#endif
    return quantize(ARGUMENTS);
}

void pcr_add_moments(const double *values, size_t count, double center, double *sums) {
#if PCR_HAVE_VECTORS
    if (pcr_have_vectors()) {
        add_moments_avx2(values, count, center, sums);
        return;
    }
#endif
    add_moments(values, count, center, sums);
}
