/* Random crops and flips. The numbers are those of SplitMix64 (Steele, Lea, Flood 2014). */
#include <math.h>

#include "pcr.h"

/* Products and sums are rounded one by one, so that every machine draws the same crops. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

static uint64_t mix(uint64_t z) {
    z += GOLDEN;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static double draw(uint64_t *state) {
    *state += GOLDEN;
    return (double)(mix(*state) >> 11) * 0x1p-53;
}

static double uniform(uint64_t *state, double low, double high) {
    return low + (high - low) * draw(state);
}

static int32_t whole(uint64_t *state, int32_t high) { /* from 0 to high */
    return (int32_t)(((double)high + 1) * draw(state));
}

static int32_t clip(double value, int32_t limit) {
    if (!(value > 0)) return 0;
    return value < limit ? (int32_t)value : limit;
}

static void middle(int32_t height, int32_t width, int32_t part_height, int32_t part_width,
                   int32_t *box) {
    box[0] = (height - part_height) / 2, box[1] = (width - part_width) / 2;
    box[2] = part_height > 1 ? part_height : 1, box[3] = part_width > 1 ? part_width : 1;
}

static void center_crop(int32_t height, int32_t width, int32_t *box) {
    int32_t side = (int32_t)nearbyint((height < width ? height : width) * 0.875);
    if (side < 1) side = 1;
    middle(height, width, side, side, box);
}

static void random_crop(uint64_t *state, const pcr_draw *how, int32_t height, int32_t width,
                        int32_t *box) {
    double low = log(how->ratio[0]), high = log(how->ratio[1]);
    for (int attempt = 0; attempt < 10; attempt++) {
        double area = (double)height * width * uniform(state, how->scale[0], how->scale[1]);
        double shape = exp(uniform(state, low, high));
        double part_width = nearbyint(sqrt(area * shape));
        double part_height = nearbyint(sqrt(area / shape));
        if (part_width > 0 && part_width <= width && part_height > 0 && part_height <= height) {
            box[2] = (int32_t)part_height, box[3] = (int32_t)part_width;
            box[0] = whole(state, height - box[2]);
            box[1] = whole(state, width - box[3]);
            return;
        }
    }
    double shape = (double)width / height;
    if (shape < how->ratio[0]) shape = how->ratio[0];
    if (shape > how->ratio[1]) shape = how->ratio[1];
    middle(height, width, clip(nearbyint(width / shape), height),
           clip(nearbyint(height * shape), width), box);
}

uint64_t pcr_draw_state(uint64_t state, uint64_t part) { return mix(state + part); }

void pcr_draw_boxes(uint64_t state, int32_t height, int32_t width, const pcr_draw *draws,
                    size_t num_views, int32_t *boxes) {
    for (size_t view = 0; view < num_views; view++, boxes += 5) {
        const pcr_draw *how = &draws[view];
        for (int i = 0; i < 5; i++) boxes[i] = 0;
        if (how->crop == PCR_CROP_CENTER) center_crop(height, width, boxes);
        if (how->crop == PCR_CROP_RANDOM) random_crop(&state, how, height, width, boxes);
        boxes[4] = how->flip > 0 && draw(&state) < how->flip;
    }
}
