/* What an image loses where its stream stops after a scan. */
#ifndef PCR_LOSS_H
#define PCR_LOSS_H

#include "pcr_internal.h"

/* A component at one scale, in cells of its own. */
typedef struct {
    int down, right; /* halvings of its samples */
    int tall, wide;  /* log2 of the scale's cells in one of its cells */
    int cells_h, cells_w;
    double dc_weight; /* of a squared coefficient */
    /* Of each cell: 1 / the number of blocks, or of averages of several; the energy and the sum of
     * the errors in DC; the energy of those in AC; the variances of picture and error. */
    double *share, *dc, *offset, *ac, *variance, *error;
    float *changes; /* of the energy in AC: (AC scans of the component, cells) */
} pcr_scaled;

/* A cell has the blocks that are 8x8 pixels at this scale. */
typedef struct {
    double share;
    int cells_h, cells_w;
    pcr_scaled parts[PCR_MAX_COMPONENTS];
} pcr_scale;

typedef struct {
    pcr_scale scales[PCR_LOSS_AT_ONCE];
    int num_scales;
    double *rows; /* two rows of cells */
    uint8_t slots[PCR_MAX_SCANS]; /* of each AC scan among those of its component */
} pcr_loss;

/* Once the coefficients are there, and the script is known to be one; without weights, there is no
 * loss. The caller frees, whatever the code. */
int pcr_loss_start(pcr_decoder *dec, const pcr_loss_weights *weights, const pcr_scan_spec *script,
                   size_t num_scans, pcr_loss *loss);
/* The loss after scan `index` of the script; to be called for each, in order. */
double pcr_loss_after(const pcr_decoder *dec, const pcr_scan_spec *script, size_t index,
                      pcr_loss *loss);
void pcr_loss_free(pcr_loss *loss);

#endif
