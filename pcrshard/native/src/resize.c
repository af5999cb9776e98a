/* Filter weights, and the resize kernels in plain C. */
#include "resize.h"

#include <math.h>

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static int max_taps(double box0, double box1, int out) {
    double scale = (box1 - box0) / out;
    return (int)ceil(scale > 1 ? scale : 1) * 2 + 1;
}

/* Lanes come in whole vectors of 32 outputs. */
static size_t num_lanes(int out) { return ((size_t)out + 31) / 32 * (32 / PCR_LANE_OUTPUTS); }

size_t pcr_filter_size(double box0, double box1, int out) {
    size_t taps = round_up((size_t)max_taps(box0, box1, out), 16);
    size_t start = round_up(4 * (size_t)out, 64), weights = round_up(2 * taps * (size_t)out, 64);
    /* Lane tables are made only when all the taps of an output fit 16 samples: 8 pairs. */
    return start + weights + num_lanes(out) * (4 + 2 * 16 * 8) + 128;
}

/* Weights of one output, Q14, that add up to exactly 1: each is a difference of rounded sums. */
static void set_weights(int16_t *weights, int first, int count, double center, double width) {
    double total = 0, sum = 0;
    int done = 0;
    for (int pass = 0; pass < 2; pass++) {
        const double one = pass ? (1 << PCR_WEIGHT_BITS) / total : 0;
        for (int i = 0; i < count; i++) {
            double weight = width - fabs(first + i + 0.5 - center);
            if (weight > 0) sum += weight;
            if (!pass) continue;
            int next = (int)(sum * one + 0.5);
            weights[i] = (int16_t)(next - done);
            done = next;
        }
        total = sum, sum = 0;
    }
}

/* Where the first taps of the outputs of a lane lie; they descend in a mirrored filter. */
static int lane_base(const pcr_filter *filter, int lane) {
    int first = pcr_min(PCR_LANE_OUTPUTS * lane, filter->out - 1);
    int last = pcr_min(first + PCR_LANE_OUTPUTS, filter->out) - 1;
    return pcr_min(filter->start[first], filter->start[last]);
}

static bool fits_lanes(const pcr_filter *filter, int taps) {
    for (int i = 0; i < filter->out; i++)
        if (filter->start[i] - lane_base(filter, i / PCR_LANE_OUTPUTS) + taps > 16) return false;
    return true;
}

/* Rearranges the weights for pmaddwd: 4 outputs x 2 taps a lane, bytes zero-extended by the
 * shuffle. */
static void build_lanes(pcr_filter *filter) {
    const int pairs = filter->stride / 2;
    for (int lane = 0; lane < (int)num_lanes(filter->out); lane++) {
        size_t at = ((size_t)(lane / 2 * pairs) * 2 + (size_t)(lane & 1)) * 16;
        filter->lane_start[lane] = lane_base(filter, lane);
        for (int i = 0; i < PCR_LANE_OUTPUTS; i++) {
            int output = PCR_LANE_OUTPUTS * lane + i;
            bool used = output < filter->out;
            int tap = used ? filter->start[output] - filter->lane_start[lane] : 0;
            const int16_t *from = filter->weights + (used ? output * filter->stride : 0);
            for (int pair = 0; pair < pairs; pair++, tap += 2) {
                size_t to = at + 32 * (size_t)pair + 4 * (size_t)i;
                const uint8_t shuffle[4] = {(uint8_t)tap, 0x80, (uint8_t)(tap + 1), 0x80};
                memcpy(filter->shuffle + to, shuffle, 4);
                memset(filter->lane_weights + to / 2, 0, 4);
                if (used) memcpy(filter->lane_weights + to / 2, from + 2 * pair, 4);
            }
        }
    }
}

void pcr_filter_build(pcr_filter *filter, uint8_t *memory, int in_size, double box0, double box1,
                      int out, bool across, bool mirrored) {
    double scale = (box1 - box0) / out, width = scale > 1 ? scale : 1;
    int taps = max_taps(box0, box1, out), widest = 0;
    filter->out = out;
    filter->start = (int32_t *)memory;
    memory += round_up(4 * (size_t)out, 64);
    filter->weights = (int16_t *)memory;
    memory += round_up(2 * round_up((size_t)taps, 16) * (size_t)out, 64);
    for (int i = 0; i < out; i++) {
        double center = box0 + ((mirrored ? out - 1 - i : i) + 0.5) * scale;
        int first = pcr_max((int)(center - width + 0.5), 0),
            stop = pcr_min((int)(center + width + 0.5), in_size);
        filter->start[i] = first;
        widest = pcr_max(widest, stop - first);
    }
    filter->first = filter->start[mirrored ? out - 1 : 0];
    for (int i = 0; i < out; i++) filter->start[i] -= filter->first;
    filter->stride = (widest + 1) & ~1;
    filter->narrow = across && filter->stride <= 16 && fits_lanes(filter, filter->stride);
    if (across && !filter->narrow) filter->stride = (int)round_up((size_t)widest, 16);
    memset(filter->weights, 0, 2 * (size_t)filter->stride * (size_t)out);
    for (int i = 0; i < out; i++) {
        double center = box0 + ((mirrored ? out - 1 - i : i) + 0.5) * scale;
        int first = filter->start[i] + filter->first,
            stop = pcr_min((int)(center + width + 0.5), in_size);
        set_weights(filter->weights + (size_t)i * (size_t)filter->stride, first, stop - first,
                    center, width);
    }
    if (!filter->narrow) return;
    filter->lane_start = (int32_t *)memory;
    filter->shuffle = memory + round_up(4 * num_lanes(out), 64);
    filter->lane_weights =
        (int16_t *)(filter->shuffle + num_lanes(out) * 16 * (size_t)(filter->stride / 2));
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
