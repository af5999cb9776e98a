/* Estimates of unknown coefficients, compiled once per instruction set.
 *
 * The sums are jdcoefct.c's, with what is symmetric in them taken together. libjpeg divides them in
 * whole numbers; below 2^21 a product with the reciprocal, half a unit up, has the same whole part,
 * because it errs by less than a sixth of the distance to the next quotient.
 */
#include "smooth.h"

typedef int32_t pcr_smooth_sums[PCR_SMOOTHED][PCR_SMOOTH_CHUNK];

/* Where nothing but the DC is known: the DC becomes a mean of its neighbours', too. */
static inline void sum_blend(const int16_t *const rows[PCR_SMOOTH_ROWS], int at,
                             pcr_smooth_sums sum) {
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) {
        int32_t centre[5], near_sum[5], near_step[5], far_sum[5], far_step[5];
        for (int r = 0; r < 5; r++) {
            const int16_t *x = rows[r] + at + i;
            centre[r] = x[0];
            near_sum[r] = x[-1] + x[1], near_step[r] = x[-1] - x[1];
            far_sum[r] = x[-2] + x[2], far_step[r] = x[-2] - x[2];
        }
        int32_t centre1 = centre[1] + centre[3], centre0 = centre[0] + centre[4];
        int32_t near1 = near_sum[1] + near_sum[3], near0 = near_sum[0] + near_sum[4];
        int32_t step1 = near_step[1] + near_step[3], step0 = near_step[0] + near_step[4];
        int32_t fall = centre[1] - centre[3], near_fall = near_sum[1] - near_sum[3];
        int32_t far1 = far_sum[1] + far_sum[3], far0 = far_sum[0] + far_sum[4];
        sum[0][i] = 152 * centre[2] + 42 * (near_sum[2] + centre1) - 8 * (far_sum[2] + centre0) +
            6 * (near1 - far1 - near0) - 2 * far0;
        sum[1][i] = 38 * near_step[2] + 13 * step1 - 3 * (far_step[2] + far_step[1] + far_step[3]) -
            step0 - far_step[0] - far_step[4];
        sum[2][i] = 38 * fall + 13 * near_fall - 3 * (centre[0] - centre[4] + near_sum[0] -
                                                      near_sum[4]) -
            (far_sum[1] - far_sum[3] + far_sum[0] - far_sum[4]);
        sum[3][i] = centre0 + 7 * centre1 + 2 * near1 - 14 * centre[2] - 5 * near_sum[2];
        sum[4][i] = 9 * (near_step[1] - near_step[3]) - (far_step[0] - far_step[4]);
        sum[5][i] = 7 * near_sum[2] + far_sum[2] - 14 * centre[2] + 2 * near1 - 5 * centre1;
        sum[6][i] = step1 + 2 * near_step[2];
        sum[7][i] = near_fall - 3 * fall;
        sum[8][i] = step1 - 3 * near_step[2];
        sum[9][i] = near_fall + 2 * fall;
    }
}

/* Where some AC coefficients are known. */
static inline void sum_predict(const int16_t *const rows[PCR_SMOOTH_ROWS], int at,
                               pcr_smooth_sums sum) {
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

void PCR_NAME(smooth)(PCR_SMOOTH_PARAMETERS) {
    const int stop = how->blend ? PCR_SMOOTHED : 6;
    for (int at = 0; at < count; at += PCR_SMOOTH_CHUNK, ac += 64 * PCR_SMOOTH_CHUNK) {
        pcr_smooth_sums sum;
        int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK] = {{0}}, found[PCR_SMOOTH_CHUNK] = {0};
        if (how->blend)
            sum_blend(rows, at, sum);
        else
            sum_predict(rows, at, sum);
        for (int k = !how->blend; k < stop; k++) {
            const float slope = how->slope[k], offset = how->offset[k];
            const int32_t limit = how->limit[k];
            for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) {
                int32_t value = sum[k][i], size = value < 0 ? -value : value;
                size = (int32_t)((float)size * slope + offset);
                size = size < limit ? size : limit;
                estimate[k][i] = (int16_t)(value < 0 ? -size : size);
            }
        }
        for (int i = 0; how->blend && i < PCR_SMOOTH_CHUNK; i++) dc[at + i] = estimate[0][i];
        for (int k = 1; k < stop; k++)
            for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) found[i] |= estimate[k][i];
        for (int i = 0; i < PCR_SMOOTH_CHUNK; i++) any[at + i] = found[i] ? PCR_SMOOTHED_AC : 0;
        pcr_scatter(ac, estimate);
    }
}
