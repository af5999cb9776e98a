/* Antialiased bilinear resize with a box: the sample positions and weights of Pillow's BILINEAR. */
#ifndef PCR_RESIZE_H
#define PCR_RESIZE_H

#include "pcr_internal.h"

enum { PCR_WEIGHT_BITS = 14, PCR_LANE_OUTPUTS = 4 };

/* One axis. Output i is the sum of weights[i * stride + t] * source[start[i] + t]. */
struct pcr_filter {
    int out, stride;  /* stride: taps per output, padded with zero weights */
    int first;        /* source sample that start[] counts from */
    int32_t *start;   /* relative to first */
    int16_t *weights;
    /* For rows, if the taps of 4 neighboring outputs, a lane, always lie within 16 samples: per
     * lane the load's offset, and per pair of taps a byte shuffle and the weights, for the vector
     * kernel. */
    bool narrow;
    int32_t *lane_start;
    uint8_t *shuffle;
    int16_t *lane_weights;
};

/* Bytes of memory that pcr_filter_build will need. */
size_t pcr_filter_size(double box0, double box1, int out);
/* across: for rows. mirrored: the last output first. */
void pcr_filter_build(pcr_filter *filter, uint8_t *memory, int in_size, double box0, double box1,
                      int out, bool across, bool mirrored);

void pcr_resize_row_portable(uint8_t *dst, const uint8_t *src, const pcr_filter *filter);
void pcr_resize_column_portable(uint8_t *dst, const uint8_t *src, size_t stride,
                                const int16_t *weights, int taps, int count);
void pcr_resize_row_avx2(uint8_t *dst, const uint8_t *src, const pcr_filter *filter);
void pcr_resize_column_avx2(uint8_t *dst, const uint8_t *src, size_t stride, const int16_t *weights,
                            int taps, int count);

#endif
