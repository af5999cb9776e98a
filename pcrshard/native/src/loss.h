/* What an image loses where its stream stops after a scan. */
#ifndef PCR_LOSS_H
#define PCR_LOSS_H

#include "pcr_internal.h"

/* A component at one scale, in cells of its own. */
typedef struct {
    int down, right;    /* halvings of its samples */
    int tall, wide;     /* log2 of the scale's cells in one of its cells */
    int cells_h, cells_w;
    double weights[64]; /* of a squared coefficient, in zigzag order */
    /* Of each cell: the number of blocks, or of averages of several; the energy and the sum of the
     * errors in DC; the energy of those in AC; the variance of the picture. */
    double *pixels, *dc, *offset, *ac, *variance;
} pcr_scaled;

/* A cell has the blocks that are 8x8 pixels at this scale. */
typedef struct {
    double share;
    int cells_h, cells_w;
    pcr_scaled parts[PCR_MAX_COMPONENTS];
} pcr_scale;

typedef struct {
    pcr_scale scales[PCR_LOSS_SCALES];
    size_t num_scales;
} pcr_loss;

/* Once the coefficients are there; without weights, there is no loss. The caller frees, whatever
 * the code. */
int pcr_loss_start(pcr_decoder *dec, const pcr_loss_weights *weights, pcr_loss *loss);
/* The loss after one more scan. */
double pcr_loss_after(const pcr_decoder *dec, const pcr_scan_spec *spec, pcr_loss *loss);
void pcr_loss_free(pcr_loss *loss);

#endif
