/* Filter weights, and the resize kernels in plain C. */
#include "resize.h"

#include <math.h>

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static int max_taps(double box0, double box1, int out) {
    double scale = (box1 - box0) / out;
    return (int)ceil(scale > 1 ? scale : 1) * 2 + 1;
}

size_t pcr_filter_size(double box0, double box1, int out) {
    size_t taps = round_up((size_t)max_taps(box0, box1, out), 16), groups = ((size_t)out + 7) / 8;
    size_t start = round_up(4 * (size_t)out, 64), weights = round_up(2 * taps * (size_t)out, 64);
    /* Lane tables are made only when all the taps of an output fit 16 samples. */
    size_t lanes = groups * (round_up(8, 64) + 8 * 64);
    return start + weights + lanes + 128;
}

/* Weights of one output, Q14, that add up to exactly 1: each is a difference of rounded sums. */
static void set_weights(int16_t *weights, int first, int count, double centre, double width) {
    double total = 0, sum = 0;
    int done = 0;
    for (int i = 0; i < count; i++) total += fmax(0, 1 - fabs(first + i + 0.5 - centre) / width);
    for (int i = 0; i < count; i++) {
        sum += fmax(0, 1 - fabs(first + i + 0.5 - centre) / width);
        int next = (int)lround(sum / total * (1 << PCR_WEIGHT_BITS));
        weights[i] = (int16_t)(next - done);
        done = next;
    }
}

static bool fits_lanes(const pcr_filter *filter, int taps) {
    if (taps > 16) return false;
    for (int i = 0; i < filter->out; i++) {
        int base = filter->start[i / PCR_LANE_OUTPUTS * PCR_LANE_OUTPUTS];
        if (filter->start[i] - base + taps > 16) return false;
    }
    return true;
}

/* Rearranges the weights for pmaddwd: 4 outputs x 2 taps a lane, bytes zero-extended by the
 * shuffle. */
static void build_lanes(pcr_filter *filter) {
    int groups = (filter->out + 7) / 8, pairs = filter->stride / 2;
    for (int lane = 0; lane < 2 * groups; lane++) {
        int first = pcr_min(PCR_LANE_OUTPUTS * lane, filter->out - 1);
        filter->lane_start[lane] = filter->start[first];
        for (int pair = 0; pair < pairs; pair++) {
            size_t at = ((size_t)(lane / 2) * (size_t)pairs + (size_t)pair) * 32 +
                (size_t)(lane & 1) * 16;
            for (int i = 0; i < 8; i++) {
                int output = PCR_LANE_OUTPUTS * lane + i / 2, tap = 2 * pair + (i & 1);
                bool used = output < filter->out;
                filter->shuffle[at + 2 * (size_t)i] =
                    used ? (uint8_t)(filter->start[output] - filter->lane_start[lane] + tap) : 0x80;
                filter->shuffle[at + 2 * (size_t)i + 1] = 0x80;
                filter->lane_weights[at / 2 + (size_t)i] =
                    used ? filter->weights[(size_t)output * (size_t)filter->stride + (size_t)tap]
                        : 0;
            }
        }
    }
}

void pcr_filter_build(pcr_filter *filter, uint8_t *memory, int in_size, double box0, double box1,
                      int out) {
    double scale = (box1 - box0) / out, width = scale > 1 ? scale : 1;
    int taps = max_taps(box0, box1, out), widest = 0;
    filter->out = out;
    filter->start = (int32_t *)memory;
    memory += round_up(4 * (size_t)out, 64);
    filter->weights = (int16_t *)memory;
    memory += round_up(2 * round_up((size_t)taps, 16) * (size_t)out, 64);
    for (int i = 0; i < out; i++) {
        double centre = box0 + (i + 0.5) * scale;
        int first = pcr_max((int)(centre - width + 0.5), 0),
            stop = pcr_min((int)(centre + width + 0.5), in_size);
        filter->start[i] = first;
        widest = pcr_max(widest, stop - first);
        filter->stop = stop;
    }
    filter->first = filter->start[0];
    for (int i = 0; i < out; i++) filter->start[i] -= filter->first;
    int even = (widest + 1) & ~1;
    filter->narrow = fits_lanes(filter, even);
    filter->stride = filter->narrow ? even : (int)round_up((size_t)widest, 16);
    memset(filter->weights, 0, 2 * (size_t)filter->stride * (size_t)out);
    for (int i = 0; i < out; i++) {
        double centre = box0 + (i + 0.5) * scale;
        int first = filter->start[i] + filter->first,
            stop = pcr_min((int)(centre + width + 0.5), in_size);
        set_weights(filter->weights + (size_t)i * (size_t)filter->stride, first, stop - first,
                    centre, width);
    }
    if (!filter->narrow) return;
    size_t groups = ((size_t)out + 7) / 8, lane_bytes = groups * 32 * (size_t)(filter->stride / 2);
    filter->lane_start = (int32_t *)memory;
    filter->shuffle = memory + round_up(8 * groups, 64);
    filter->lane_weights = (int16_t *)(filter->shuffle + lane_bytes);
    build_lanes(filter);
}

static inline uint8_t weigh(int32_t sum) {
    return (uint8_t)((sum + (1 << (PCR_WEIGHT_BITS - 1))) >> PCR_WEIGHT_BITS);
}

void pcr_resize_row_portable(uint8_t *dst, const uint8_t *src, const pcr_filter *filter) {
    const int16_t *weights = filter->weights;
    for (int i = 0; i < filter->out; i++, weights += filter->stride) {
        const uint8_t *from = src + filter->start[i];
        int32_t sum = 0;
        for (int t = 0; t < filter->stride; t++) sum += weights[t] * from[t];
        dst[i] = weigh(sum);
    }
}

void pcr_resize_column_portable(uint8_t *dst, const uint8_t *src, size_t stride,
                                const int16_t *weights, int taps, int count) {
    for (int i = 0; i < count; i++) {
        int32_t sum = 0;
        for (int t = 0; t < taps; t++) sum += weights[t] * src[(size_t)t * stride + (size_t)i];
        dst[i] = weigh(sum);
    }
}
