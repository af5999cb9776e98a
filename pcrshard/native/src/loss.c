/* How much an image loses where its stream stops after a scan, from its coefficients alone: in each
 * cell of each scale, the variance of the error against that and twice the variance of the picture,
 * as in SSIM's contrast: an offset of a whole cell costs nothing. */
#include "loss.h"

#include <stdlib.h>

/* What averaging pairs of pixels leaves of the energy of the eight frequencies of a block, after
 * 0 to 3 times: products of cos(pi u 2^i / 16)^2. */
static const double kept[4][8] = {
    {1, 1, 1, 1, 1, 1, 1, 1},
    {1, 0.961939766255643, 0.853553390593274, 0.691341716182545, 0.5, 0.308658283817455,
     0.146446609406726, 0.0380602337443566},
    {1, 0.821067899101103, 0.426776695296637, 0.101242768518559, 0, 0.0452013422702660,
     0.0732233047033631, 0.0324862921498825},
    {1, 0.410533949550551, 0, 0.0506213842592797, 0, 0.0226006711351330, 0, 0.0162431460749413},
};
static const uint8_t natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
/* SSIM's, (0.03 * 255)^2. */
static const double stabilizer = 58.5225;
enum { ALL_BITS = 0x7FFF };

static size_t num_cells(const pcr_scaled *part) {
    return (size_t)part->cells_h * (size_t)part->cells_w;
}

static size_t cell_of(const pcr_scaled *part, int y, int x) {
    return (size_t)(y >> part->down) * (size_t)part->cells_w + (size_t)(x >> part->right);
}

/* Sets energy and sum of those bits of the DC coefficients that are in `bits`; counts, at first.
 * Beyond 3 halvings, several blocks are one pixel. */
static void set_dc(const pcr_component *comp, pcr_scaled *part, int bits, bool is_first) {
    const int high = 1 << pcr_max(part->down - 3, 0), wide = 1 << pcr_max(part->right - 3, 0);
    memset(part->dc, 0, 2 * num_cells(part) * sizeof *part->dc);
    for (int y = 0; y < comp->blocks_h; y += high)
        for (int x = 0; x < comp->blocks_w; x += wide) {
            const size_t cell = cell_of(part, y, x);
            int64_t sum = 0, count = 0;
            for (int j = y; j < pcr_min(y + high, comp->blocks_h); j++)
                for (int i = x; i < pcr_min(x + wide, comp->blocks_w); i++, count++)
                    sum += comp->dc[(size_t)j * (size_t)comp->stride + (size_t)i] & bits;
            const double mean = (double)sum / (double)count;
            part->dc[cell] += part->weights[0] * mean * mean;
            part->offset[cell] += mean;
            if (is_first) part->pixels[cell] += 1;
        }
}

/* Adds the energy of coefficients ss to se in their bits `after`, less that in bits `before`. */
static void add_ac(const pcr_component *comp, pcr_loss *loss, int component, int ss, int se,
                   int before, int after) {
    const uint64_t band = ~UINT64_C(0) >> ss & ~(se == 63 ? 0 : ~UINT64_C(0) >> (se + 1));
    for (int y = 0; y < comp->blocks_h; y++)
        for (int x = 0; x < comp->blocks_w; x++) {
            const size_t at = (size_t)y * (size_t)comp->stride + (size_t)x;
            const int16_t *block = comp->ac + 64 * at;
            double sums[PCR_LOSS_SCALES] = {0};
            for (uint64_t left = comp->mask[at] & band; left;) {
                int k = __builtin_clzll(left);
                int value = abs(block[k]), old = value & before, new = value & after;
                left &= ~(UINT64_C(1) << (63 - k));
                if (old == new) continue;
                double change = (double)(new * new - old * old);
                for (size_t i = 0; i < loss->num_scales; i++)
                    sums[i] += loss->scales[i].parts[component].weights[k] * change;
            }
            for (size_t i = 0; i < loss->num_scales; i++) {
                pcr_scaled *part = &loss->scales[i].parts[component];
                part->ac[cell_of(part, y, x)] += sums[i];
            }
        }
}

static int halvings(int ratio) { return ratio >= 4 ? 2 : ratio >= 2; }

static int start_part(pcr_decoder *dec, const pcr_component *comp, int halved, double weight,
                      pcr_scaled *part) {
    const int down = halvings(dec->v_max / comp->v), right = halvings(dec->h_max / comp->h);
    part->down = pcr_max(halved - down, 0);
    part->right = pcr_max(halved - right, 0);
    part->tall = pcr_max(down - halved, 0);
    part->wide = pcr_max(right - halved, 0);
    part->cells_h = ((comp->blocks_h - 1) >> part->down) + 1;
    part->cells_w = ((comp->blocks_w - 1) >> part->right) + 1;
    const double *rows = kept[pcr_min(part->down, 3)], *cols = kept[pcr_min(part->right, 3)];
    for (int k = 0; k < (part->down > 3 || part->right > 3 ? 1 : 64); k++)
        part->weights[k] = weight * rows[natural[k] / 8] * cols[natural[k] % 8] * comp->quant[k] *
            comp->quant[k] / 64.0;
    part->pixels = calloc(5 * num_cells(part), sizeof *part->pixels);
    if (!part->pixels) return pcr_fail(dec, PCR_MEMORY, "expected memory for a loss, got none");
    part->dc = part->pixels + num_cells(part);
    part->offset = part->dc + num_cells(part);
    part->ac = part->offset + num_cells(part);
    part->variance = part->ac + num_cells(part);
    return PCR_OK;
}

int pcr_loss_start(pcr_decoder *dec, const pcr_loss_weights *weights, pcr_loss *loss) {
    memset(loss, 0, sizeof *loss);
    for (int halved = 0; halved < PCR_LOSS_SCALES && weights; halved++) {
        if (weights->scales[halved] <= 0) continue;
        pcr_scale *scale = &loss->scales[loss->num_scales++];
        scale->share = weights->scales[halved];
        for (int c = 0; c < dec->num_components; c++) {
            pcr_scaled *part = &scale->parts[c];
            int code = start_part(dec, &dec->comp[c], halved, weights->components[c], part);
            if (code) return code;
            scale->cells_h = pcr_max(scale->cells_h, part->cells_h);
            scale->cells_w = pcr_max(scale->cells_w, part->cells_w);
        }
    }
    for (int c = 0; c < dec->num_components && loss->num_scales; c++) {
        add_ac(&dec->comp[c], loss, c, 1, 63, 0, ALL_BITS);
        for (size_t i = 0; i < loss->num_scales; i++) {
            pcr_scaled *part = &loss->scales[i].parts[c];
            set_dc(&dec->comp[c], part, -1, true);
            for (size_t cell = 0; cell < num_cells(part); cell++) {
                const double count = part->pixels[cell], mean = part->offset[cell] / count;
                part->variance[cell] =
                    (part->dc[cell] + part->ac[cell]) / count - part->weights[0] * mean * mean;
            }
        }
    }
    return PCR_OK;
}

/* The mean over the cells. */
static double loss_of(const pcr_decoder *dec, const pcr_scale *scale) {
    double sum = 0;
    for (int y = 0; y < scale->cells_h; y++)
        for (int x = 0; x < scale->cells_w; x++) {
            double error = 0, variance = 0;
            for (int c = 0; c < dec->num_components; c++) {
                const pcr_scaled *part = &scale->parts[c];
                const size_t cell = (size_t)pcr_min(y >> part->tall, part->cells_h - 1) *
                        (size_t)part->cells_w + (size_t)pcr_min(x >> part->wide, part->cells_w - 1);
                const double count = part->pixels[cell], mean = part->offset[cell] / count;
                error +=
                    (part->dc[cell] + part->ac[cell]) / count - part->weights[0] * mean * mean;
                variance += part->variance[cell];
            }
            sum += error / (2 * variance + error + stabilizer);
        }
    return sum / ((double)scale->cells_h * scale->cells_w);
}

double pcr_loss_after(const pcr_decoder *dec, const pcr_scan_spec *spec, pcr_loss *loss) {
    double sum = 0;
    for (int i = 0; i < spec->num_components && loss->num_scales; i++) {
        const int c = spec->component[i];
        if (spec->se)
            add_ac(&dec->comp[c], loss, c, pcr_max(spec->ss, 1), spec->se,
                   spec->ah ? (1 << spec->ah) - 1 : ALL_BITS, (1 << spec->al) - 1);
        for (size_t j = 0; j < loss->num_scales && !spec->ss; j++)
            set_dc(&dec->comp[c], &loss->scales[j].parts[c], (1 << spec->al) - 1, false);
    }
    for (size_t i = 0; i < loss->num_scales; i++)
        sum += loss->scales[i].share * loss_of(dec, &loss->scales[i]);
    return sum;
}

void pcr_loss_free(pcr_loss *loss) {
    for (size_t i = 0; i < loss->num_scales; i++)
        for (int c = 0; c < PCR_MAX_COMPONENTS; c++) free(loss->scales[i].parts[c].pixels);
}
