/* Block smoothing in plain C.
 *
 * The sums are jdcoefct.c's, with what is symmetric in them taken together. libjpeg divides them in
 * whole numbers; below 2^21 a product with the reciprocal, half a unit up, has the same whole part,
 * because it errs by less than a sixth of the distance to the next quotient.
 */
#include "smooth.h"

typedef int32_t sums[PCR_SMOOTHED][PCR_SMOOTH_CHUNK];

/* Where nothing but the DC is known: the DC becomes a mean of its neighbors', too. */
static void sum_blend(int16_t *const rows[PCR_SMOOTH_ROWS], int at, sums sum) {
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) {
        int32_t center[5], near_sum[5], near_step[5], far_sum[5], far_step[5];
        for (int r = 0; r < 5; r++) {
            const int16_t *x = rows[r] + at + i;
            center[r] = x[0];
            near_sum[r] = x[-1] + x[1], near_step[r] = x[-1] - x[1];
            far_sum[r] = x[-2] + x[2], far_step[r] = x[-2] - x[2];
        }
        int32_t center1 = center[1] + center[3], center0 = center[0] + center[4];
        int32_t near1 = near_sum[1] + near_sum[3], near0 = near_sum[0] + near_sum[4];
        int32_t step1 = near_step[1] + near_step[3], step0 = near_step[0] + near_step[4];
        int32_t far1 = far_sum[1] + far_sum[3], far0 = far_sum[0] + far_sum[4];
        int32_t fall = center[1] - center[3], near_fall = near_sum[1] - near_sum[3];
        int32_t outer_fall = center[0] - center[4] + near_sum[0] - near_sum[4];
        int32_t far_fall = far_sum[1] - far_sum[3] + far_sum[0] - far_sum[4];
        sum[0][i] = 152 * center[2] + 42 * (near_sum[2] + center1) - 8 * (far_sum[2] + center0) +
            6 * (near1 - far1 - near0) - 2 * far0;
        sum[1][i] = 38 * near_step[2] + 13 * step1 - 3 * (far_step[1] + far_step[2] + far_step[3]) -
            step0 - far_step[0] - far_step[4];
        sum[2][i] = 38 * fall + 13 * near_fall - 3 * outer_fall - far_fall;
        sum[3][i] = center0 + 7 * center1 + 2 * near1 - 14 * center[2] - 5 * near_sum[2];
        sum[4][i] = 9 * (near_step[1] - near_step[3]) - (far_step[0] - far_step[4]);
        sum[5][i] = 7 * near_sum[2] + far_sum[2] - 14 * center[2] + 2 * near1 - 5 * center1;
        sum[6][i] = step1 + 2 * near_step[2];
        sum[7][i] = near_fall - 3 * fall;
        sum[8][i] = step1 - 3 * near_step[2];
        sum[9][i] = near_fall + 2 * fall;
    }
}

/* Where some AC coefficients are known. */
static void sum_predict(int16_t *const rows[PCR_SMOOTH_ROWS], int at, sums sum) {
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) {
        const int16_t *above2 = rows[0] + at + i, *above = rows[1] + at + i;
        const int16_t *here = rows[2] + at + i, *below = rows[3] + at + i;
        const int16_t *below2 = rows[4] + at + i;
        sum[1][i] = 50 * (here[-1] - here[1]) - 7 * (here[-2] - here[2]);
        sum[2][i] = 50 * (above[0] - below[0]) - 7 * (above2[0] - below2[0]);
        sum[3][i] = 13 * (above[0] + below[0]) - 24 * here[0] - above2[0] - below2[0];
        sum[4][i] = 10 * (above[-1] - above[1] - below[-1] + below[1]) -
            (above[-2] - above[2] - below[-2] + below[2]) -
            (above2[-1] - above2[1] - below2[-1] + below2[1]);
        sum[5][i] = 13 * (here[-1] + here[1]) - 24 * here[0] - here[-2] - here[2];
    }
}

/* How many coefficients have sums; the first is the DC, which only a blend changes. */
static int add_up(const pcr_smoothing *how, int at, sums sum) {
    if (how->blend)
        sum_blend(how->rows, at, sum);
    else
        sum_predict(how->rows, at, sum);
    return how->blend ? PCR_SMOOTHED : 6;
}

static void put_chunk(const pcr_smoothing *how, int at,
                      int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK]) {
    int16_t *ac = how->ac + 64 * (size_t)at;
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++, ac += 64) {
        int found = 0;
        memset(ac, 0, PCR_SMOOTH_WIDE * sizeof *ac);
        for (int k = 1; k < PCR_SMOOTHED; k++) found |= ac[k] = estimate[k][i];
        how->mask[at + i] = found ? PCR_SMOOTHED_AC : 0;
        how->dc[at + i] = how->blend ? estimate[0][i] : how->rows[2][at + i];
    }
}

/* Coefficients that are known replace the estimates. */
static void put_known(PCR_SMOOTH_PARAMETERS) {
    static const int16_t zeros[64];
    int16_t *to = how->ac;
    for (int i = 0; i < count; i++, ac += 64, to += 64) {
        const int16_t *from = mask[i] ? ac : zeros;
        for (int k = 0; k < PCR_SMOOTH_WIDE; k++) to[k] = from[k] ? from[k] : to[k];
        if (how->wide)
            memcpy(to + PCR_SMOOTH_WIDE, from + PCR_SMOOTH_WIDE,
                   sizeof *to * (64 - PCR_SMOOTH_WIDE));
        how->mask[i] |= mask[i];
    }
}

void pcr_smooth_portable(PCR_SMOOTH_PARAMETERS) {
    for (int at = 0; at < count; at += PCR_SMOOTH_CHUNK) {
        sums sum = {{0}};
        int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK] = {{0}};
        int stop = add_up(how, at, sum);
        for (int k = 0; k < stop; k++) {
            const float slope = how->slope[k], offset = how->offset[k];
            const int32_t limit = how->limit[k];
            for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) {
                int32_t value = sum[k][i], size = value < 0 ? -value : value;
                size = (int32_t)((float)size * slope + offset);
                size = size < limit ? size : limit;
                estimate[k][i] = (int16_t)(value < 0 ? -size : size);
            }
        }
        put_chunk(how, at, estimate);
    }
    if (how->known) put_known(how, count, mask, ac);
}

/* As jdcoefct.c has it: sums of 64 bits, cut to 32 and then to 16. */
static int16_t exact_estimate(int32_t sum, const pcr_smoothing *how, int k) {
    int64_t size = (int64_t)sum * how->quant[0], quant = how->quant[k];
    int32_t value = (int32_t)(((size < 0 ? -size : size) + (quant << 7)) / (quant << 8));
    value = pcr_min(value, how->limit[k]);
    return (int16_t)(uint32_t)(sum < 0 ? -(int64_t)value : value);
}

void pcr_smooth_exact(PCR_SMOOTH_PARAMETERS) {
    for (int at = 0; at < count; at += PCR_SMOOTH_CHUNK) {
        sums sum = {{0}};
        int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK] = {{0}};
        int stop = add_up(how, at, sum);
        for (int k = 0; k < stop; k++)
            for (int i = 0; i < PCR_SMOOTH_CHUNK; i++)
                estimate[k][i] = exact_estimate(sum[k][i], how, k);
        put_chunk(how, at, estimate);
    }
    if (how->known) put_known(how, count, mask, ac);
}
