/* float32 values as codes of a linear lattice. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "pcr.h"

/* Added to a number below 2^51, it leaves no bits for a fraction: rounds to even, like rint. */
#define ROUNDER 6755399441055744.0
#define MAX_CODE 1073741824.0

int pcr_quantize_linear(const uint32_t *words, size_t count, double step, double error_bound,
                        int32_t *codes, uint32_t *restored) {
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
