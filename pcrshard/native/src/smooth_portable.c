/* Block smoothing in plain C. */
#define PCR_NAME(x) pcr_##x##_portable

#include "smooth.h"

static inline void pcr_scatter(int16_t *ac,
                               int16_t estimate[PCR_SMOOTHED][PCR_SMOOTH_CHUNK]) {
    for (int i = 0; i < PCR_SMOOTH_CHUNK; i++)
        for (int k = 1; k < PCR_SMOOTHED; k++) ac[64 * i + k] = estimate[k][i];
}

#include "smooth_body.h"

/* As jdcoefct.c has it, with 64-bit sums that are cut to 32 and 16 bits. */
static int16_t exact_estimate(int32_t sum, const pcr_smoothing *how, int k) {
    int64_t size = (int64_t)sum * how->quant[0], quant = how->quant[k];
    int32_t value = (int32_t)(((size < 0 ? -size : size) + (quant << 7)) / (quant << 8));
    value = pcr_min(value, how->limit[k]);
    return (int16_t)(uint32_t)(sum < 0 ? -(int64_t)value : value);
}

void pcr_smooth_exact(PCR_SMOOTH_PARAMETERS) {
    for (int at = 0; at < count; at += PCR_SMOOTH_CHUNK) {
        pcr_smooth_sums sum = {{0}};
        if (how->blend)
            sum_blend(rows, at, sum);
        else
            sum_predict(rows, at, sum);
        for (int i = 0; i < PCR_SMOOTH_CHUNK; i++, ac += 64) {
            if (how->blend) dc[at + i] = exact_estimate(sum[0][i], how, 0);
            any[at + i] = 0;
            for (int k = 1; k < PCR_SMOOTHED; k++) {
                ac[k] = exact_estimate(sum[k][i], how, k);
                if (ac[k]) any[at + i] = PCR_SMOOTHED_AC;
            }
        }
    }
}
