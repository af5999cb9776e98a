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
enum { SAMPLED_FROM = 16 }; /* blocks on each side */

/* A number for each scale. */
typedef float lanes __attribute__((vector_size(4 * PCR_LOSS_AT_ONCE)));

/* Which AC scan of a component sends what: the first one of a coefficient all bits from `al` on,
 * others one bit. */
typedef struct {
    uint8_t first[64], al[64], bits[64][14];
    lanes weights[64]; /* of a squared coefficient, in zigzag order */
    int num_slots;
} sending;

static size_t num_cells(const pcr_scaled *part) {
    return (size_t)part->cells_h * (size_t)part->cells_w;
}

static size_t cell_of(const pcr_scaled *part, int y, int x) {
    return (size_t)(y >> part->down) * (size_t)part->cells_w + (size_t)(x >> part->right);
}

static double average(const pcr_component *comp, int y, int x, int high, int wide, int bits) {
    int64_t sum = 0, count = 0;
    for (int j = y; j < pcr_min(y + high, comp->blocks_h); j++)
        for (int i = x; i < pcr_min(x + wide, comp->blocks_w); i++, count++)
            sum += comp->dc[(size_t)j * (size_t)comp->stride + (size_t)i] & bits;
    return (double)sum / (double)count;
}

/* Sets energy and sum of those bits of the DC coefficients that are in `bits`; counts, at first.
 * Beyond 3 halvings, several blocks are one pixel. */
static void set_dc(const pcr_component *comp, pcr_scaled *part, int bits, bool is_first) {
    const int high = 1 << pcr_max(part->down - 3, 0), wide = 1 << pcr_max(part->right - 3, 0);
    memset(part->dc, 0, 2 * num_cells(part) * sizeof *part->dc);
    for (int y = 0; y < comp->blocks_h; y += high)
        for (int x = 0; x < comp->blocks_w; x += wide) {
            const size_t cell = cell_of(part, y, x);
            double mean = comp->dc[(size_t)y * (size_t)comp->stride + (size_t)x] & bits;
            if (high + wide > 2) mean = average(comp, y, x, high, wide, bits);
            part->dc[cell] += part->dc_weight * mean * mean;
            part->offset[cell] += mean;
            if (is_first) part->share[cell] += 1;
        }
}

/* How each scan changes the energy of the errors in a block; returns that of all coefficients. */
static lanes block_changes(const sending *how, const int16_t *block, uint64_t left,
                           lanes *changes) {
    lanes energy = {0};
    for (; left; left &= left - 1) {
        const int k = 63 - __builtin_ctzll(left);
        const lanes weight = how->weights[k];
        const int value = abs(block[k]);
        int rest = value & ((1 << how->al[k]) - 1);
        if (PCR_LIKELY(value == 1)) {
            energy += weight;
            changes[rest ? how->bits[k][0] : how->first[k]] -= weight;
            continue;
        }
        energy += weight * (float)(value * value);
        if (rest != value)
            changes[how->first[k]] += weight * (float)(rest * rest - value * value);
        while (rest) {
            const int bit = 31 - __builtin_clz((unsigned)rest), after = rest ^ 1 << bit;
            changes[how->bits[k][bit]] += weight * (float)(after * after - rest * rest);
            rest = after;
        }
    }
    return energy;
}

/* is_sample: one of each 2x2 blocks, in changing places. */
static void add_component(const pcr_component *comp, pcr_loss *loss, int c, const sending *how,
                          bool is_sample) {
    lanes changes[PCR_MAX_SCANS];
    const size_t num_slots = (size_t)how->num_slots;
    for (int y = 0; y < comp->blocks_h; y++)
        for (int x = 0; x < comp->blocks_w; x++) {
            if (is_sample && ((x ^ y >> 1) & 1 || (y ^ x >> 1) & 1)) continue;
            const size_t at = (size_t)y * (size_t)comp->stride + (size_t)x;
            const uint64_t mask = comp->mask[at] & ~UINT64_C(0) >> 1;
            if (!mask) continue;
            memset(changes, 0, num_slots * sizeof *changes);
            const lanes energy = block_changes(how, comp->ac + 64 * at, mask, changes);
            for (int i = 0; i < loss->num_scales; i++) {
                pcr_scaled *part = &loss->scales[i].parts[c];
                const size_t cell = cell_of(part, y, x), cells = num_cells(part);
                part->ac[cell] += energy[i];
                for (size_t slot = 0; slot < num_slots; slot++)
                    part->changes[slot * cells + cell] += changes[slot][i];
            }
        }
}

static int halvings(int ratio) { return ratio >= 4 ? 2 : ratio >= 2; }

static int start_part(pcr_decoder *dec, const pcr_component *comp, int halved, int num_slots,
                      pcr_scaled *part) {
    const int down = halvings(dec->v_max / comp->v), right = halvings(dec->h_max / comp->h);
    part->down = pcr_max(halved - down, 0);
    part->right = pcr_max(halved - right, 0);
    part->tall = pcr_max(down - halved, 0);
    part->wide = pcr_max(right - halved, 0);
    part->cells_h = ((comp->blocks_h - 1) >> part->down) + 1;
    part->cells_w = ((comp->blocks_w - 1) >> part->right) + 1;
    const size_t cells = num_cells(part);
    part->share = calloc(6 * cells, sizeof *part->share);
    part->changes = calloc((size_t)num_slots * cells + 1, sizeof *part->changes);
    if (!part->share || !part->changes)
        return pcr_fail(dec, PCR_MEMORY, "expected memory for a loss, got none");
    part->dc = part->share + cells;
    part->offset = part->dc + cells;
    part->ac = part->offset + cells;
    part->variance = part->ac + cells;
    part->error = part->variance + cells;
    return PCR_OK;
}

/* Fills how a component is sent, but for weights. */
static void find_sending(const pcr_scan_spec *script, size_t num_scans, int c, uint8_t *slots,
                         sending *how) {
    for (size_t i = 0; i < num_scans; i++) {
        if (script[i].se == 0 || script[i].component[0] != c) continue;
        slots[i] = (uint8_t)how->num_slots++;
        for (int k = pcr_max(script[i].ss, 1); k <= script[i].se; k++) {
            if (script[i].ah) {
                how->bits[k][script[i].al] = slots[i];
            } else {
                how->first[k] = slots[i];
                how->al[k] = (uint8_t)script[i].al;
            }
        }
    }
}

static int start_component(pcr_decoder *dec, const pcr_loss_weights *weights, const int *halved,
                           const pcr_scan_spec *script, size_t num_scans, int c, pcr_loss *loss) {
    const pcr_component *comp = &dec->comp[c];
    sending how = {0};
    /* Some blocks are enough where a cell has several. */
    bool is_sample = comp->blocks_h >= SAMPLED_FROM && comp->blocks_w >= SAMPLED_FROM;
    find_sending(script, num_scans, c, loss->slots, &how);
    for (int i = 0; i < loss->num_scales; i++) {
        pcr_scale *scale = &loss->scales[i];
        pcr_scaled *part = &scale->parts[c];
        int code = start_part(dec, comp, halved[i], how.num_slots, part);
        if (code) return code;
        is_sample &= part->down && part->right;
        scale->cells_h = pcr_max(scale->cells_h, part->cells_h);
        scale->cells_w = pcr_max(scale->cells_w, part->cells_w);
        const double *rows = kept[pcr_min(part->down, 3)], *cols = kept[pcr_min(part->right, 3)];
        part->dc_weight = weights->components[c] * comp->quant[0] * comp->quant[0] / 64.0;
        for (int k = 1; k < (part->down > 3 || part->right > 3 ? 1 : 64); k++)
            how.weights[k][i] =
                (float)(weights->components[c] * rows[natural[k] / 8] * cols[natural[k] % 8] *
                        comp->quant[k] * comp->quant[k] / 64.0);
    }
    for (int k = 1; k < 64 && is_sample; k++) how.weights[k] *= 4;
    add_component(comp, loss, c, &how, is_sample);
    for (int i = 0; i < loss->num_scales; i++) {
        pcr_scaled *part = &loss->scales[i].parts[c];
        set_dc(comp, part, -1, true);
        for (size_t cell = 0; cell < num_cells(part); cell++) {
            const double share = 1 / part->share[cell], mean = part->offset[cell] * share;
            part->share[cell] = share;
            part->variance[cell] =
                (part->dc[cell] + part->ac[cell]) * share - part->dc_weight * mean * mean;
            part->error[cell] = part->variance[cell];
        }
    }
    return PCR_OK;
}

int pcr_loss_start(pcr_decoder *dec, const pcr_loss_weights *weights, const pcr_scan_spec *script,
                   size_t num_scans, pcr_loss *loss) {
    int halved[PCR_LOSS_AT_ONCE] = {0};
    memset(loss, 0, sizeof *loss);
    if (weights && num_scans && script[0].se)
        return pcr_fail(dec, PCR_USAGE, "expected progressive scans, got sequential ones");
    for (int i = 0; i < PCR_LOSS_SCALES && weights; i++) {
        if (weights->scales[i] <= 0) continue;
        if (loss->num_scales == PCR_LOSS_AT_ONCE)
            return pcr_fail(dec, PCR_USAGE, "expected at most %d scales with a weight, got more",
                            PCR_LOSS_AT_ONCE);
        loss->scales[loss->num_scales].share = weights->scales[i];
        halved[loss->num_scales++] = i;
    }
    for (int c = 0; c < dec->num_components && loss->num_scales; c++) {
        int code = start_component(dec, weights, halved, script, num_scans, c, loss);
        if (code) return code;
    }
    loss->rows = calloc(2 * (size_t)dec->width + 1, sizeof *loss->rows);
    if (!loss->rows) return pcr_fail(dec, PCR_MEMORY, "expected memory for a loss, got none");
    return PCR_OK;
}

/* Adds the error and the variance of a component to each cell of a row. */
static void add_row(const pcr_scale *scale, const pcr_scaled *part, int y, double *errors,
                    double *variances) {
    const size_t row = (size_t)pcr_min(y >> part->tall, part->cells_h - 1) * (size_t)part->cells_w;
    const double *error = part->error + row, *variance = part->variance + row;
    const int same = part->wide ? 0 : pcr_min(scale->cells_w, part->cells_w);
    for (int x = 0; x < same; x++) {
        errors[x] += error[x];
        variances[x] += variance[x];
    }
    for (int x = same; x < scale->cells_w; x++) {
        const int cell = pcr_min(x >> part->wide, part->cells_w - 1);
        errors[x] += error[cell];
        variances[x] += variance[cell];
    }
}

/* The mean over the cells; rows: memory for two of them. */
static double loss_of(const pcr_decoder *dec, const pcr_scale *scale, double *rows) {
    double sum = 0, *variances = rows + scale->cells_w;
    for (int y = 0; y < scale->cells_h; y++) {
        memset(rows, 0, 2 * (size_t)scale->cells_w * sizeof *rows);
        for (int c = 0; c < dec->num_components; c++)
            add_row(scale, &scale->parts[c], y, rows, variances);
        for (int x = 0; x < scale->cells_w; x++)
            sum += rows[x] / (2 * variances[x] + rows[x] + stabilizer);
    }
    return sum / ((double)scale->cells_h * scale->cells_w);
}

double pcr_loss_after(const pcr_decoder *dec, const pcr_scan_spec *script, size_t index,
                      pcr_loss *loss) {
    const pcr_scan_spec *spec = &script[index];
    double sum = 0;
    for (int i = 0; i < spec->num_components; i++)
        for (int j = 0; j < loss->num_scales; j++) {
            const int c = spec->component[i];
            pcr_scaled *part = &loss->scales[j].parts[c];
            const size_t cells = num_cells(part);
            if (spec->ss == 0) set_dc(&dec->comp[c], part, (1 << spec->al) - 1, false);
            const float *changes = part->changes + loss->slots[index] * cells;
            for (size_t cell = 0; cell < cells; cell++) {
                if (spec->se) part->ac[cell] += changes[cell];
                const double mean = part->offset[cell] * part->share[cell];
                part->error[cell] = (part->dc[cell] + part->ac[cell]) * part->share[cell] -
                    part->dc_weight * mean * mean;
            }
        }
    for (int i = 0; i < loss->num_scales; i++)
        sum += loss->scales[i].share * loss_of(dec, &loss->scales[i], loss->rows);
    return sum;
}

void pcr_loss_free(pcr_loss *loss) {
    free(loss->rows);
    for (int i = 0; i < loss->num_scales; i++)
        for (int c = 0; c < PCR_MAX_COMPONENTS; c++) {
            free(loss->scales[i].parts[c].share);
            free(loss->scales[i].parts[c].changes);
        }
}
