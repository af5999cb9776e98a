/* Where and how block smoothing applies, and the rows that it reads and makes. */
#include "smooth.h"

static size_t align(size_t n) { return (n + 63) / 64 * 64; }

/* Blocks of a row, in whole chunks. */
static size_t padded_count(const pcr_plane *plane) {
    int chunks = pcr_ceil_div(plane->block_x1 - plane->block_x0, PCR_SMOOTH_CHUNK);
    return (size_t)chunks * PCR_SMOOTH_CHUNK;
}

/* A row of DCs with room for what its ends look at. */
static size_t row_bytes(const pcr_plane *plane) {
    return align((padded_count(plane) + 2 * PCR_SMOOTH_CHUNK) * sizeof(int16_t));
}

size_t pcr_smoothing_bytes(const pcr_plane *plane) {
    size_t count = padded_count(plane);
    if (!plane->smoothing.on) return 0;
    return PCR_SMOOTH_ROWS * row_bytes(plane) + align(2 * count) + 8 * count + 128 * count;
}

void pcr_place_smoothing(pcr_plane *plane, uint8_t *at) {
    pcr_smoothing *how = &plane->smoothing;
    size_t count = padded_count(plane);
    if (!how->on) return;
    for (int r = 0; r < PCR_SMOOTH_ROWS; r++, at += row_bytes(plane))
        how->rows[r] = (int16_t *)at + PCR_SMOOTH_CHUNK;
    how->dc = (int16_t *)at;
    at += align(2 * count);
    how->mask = (uint64_t *)at;
    at += 8 * count;
    how->ac = (int16_t *)at;
    /* Coefficients that are not known of any block are written here only. */
    memset(at, 0, 128 * count);
}

/* libjpeg smooths all components or none. */
static bool may_smooth(const pcr_decoder *dec) {
    if (!dec->plan.request.smooth || !dec->progressive) return false;
    for (int c = 0; c < dec->num_components; c++) {
        const pcr_component *comp = &dec->comp[c];
        if (!comp->quant_latched || comp->precision[0] < 0) return false;
        for (int k = 0; k < PCR_SMOOTHED; k++)
            if (comp->quant[k] == 0) return false;
    }
    return true;
}

static bool any_known(const pcr_component *comp, int first, int stop) {
    for (int k = first; k < stop; k++)
        if (comp->precision[k] >= 0) return true;
    return false;
}

static bool any_inexact(const pcr_component *comp) {
    for (int k = 1; k < PCR_SMOOTHED; k++)
        if (comp->precision[k] != 0) return true;
    return false;
}

static int largest_dc(const pcr_component *comp) {
    size_t count = (size_t)comp->stride * (size_t)comp->rows;
    int largest = 0;
    for (size_t i = 0; i < count; i++) {
        int size = comp->dc[i] < 0 ? -comp->dc[i] : comp->dc[i];
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* The weights of the DC's mean are the largest: 432 together, signs aside. */
static bool is_too_large(const pcr_component *comp) {
    int largest = largest_dc(comp), quant = 0;
    if (largest > PCR_SMOOTH_LARGEST) return true;
    for (int k = 0; k < PCR_SMOOTHED; k++) quant = pcr_max(quant, comp->quant[k]);
    return (int64_t)432 * largest * comp->quant[0] + 128 * quant >= 1 << 21;
}

static void plan_component(pcr_decoder *dec, int c) {
    const pcr_component *comp = &dec->comp[c];
    pcr_smoothing *how = &dec->plan.planes[c].smoothing;
    how->blend = !any_known(comp, 1, PCR_SMOOTHED);
    how->known = any_known(comp, 1, 64);
    how->wide = any_known(comp, PCR_SMOOTH_WIDE, 64);
    how->on = comp->needed && (comp->dc_only ? how->blend : any_inexact(comp));
    if (!how->on) return;
    how->exact = is_too_large(comp);
    for (int k = 0; k < PCR_SMOOTHED; k++) {
        int bits = k ? comp->precision[k] : -1;
        float divisor = 256 * (float)comp->quant[k];
        how->quant[k] = comp->quant[k];
        how->limit[k] = bits < 0 ? INT32_MAX : (1 << bits) - 1;
        how->slope[k] = (float)comp->quant[0] / divisor;
        how->offset[k] = 0.5F + 0.5F / divisor;
    }
}

void pcr_plan_smoothing(pcr_decoder *dec) {
    bool may = may_smooth(dec);
    for (int c = 0; c < dec->num_components; c++) {
        dec->plan.planes[c].smoothing.on = false;
        if (may) plan_component(dec, c);
    }
}

/* The five rows that row `y` looks at. libjpeg counts rows as if all MCU rows had as many blocks as
 * this one, and rows that only fill up an MCU belong to the image unless they are in its last. */
static void near_rows(const pcr_decoder *dec, const pcr_component *comp, int y, int near[5]) {
    int mcu_row = y / comp->v, in_mcu = comp->v;
    if (mcu_row == dec->mcus_h - 1 && comp->blocks_h % comp->v) in_mcu = comp->blocks_h % comp->v;
    int counted = mcu_row * in_mcu + y % comp->v, last = in_mcu * dec->mcus_h - 1;
    near[2] = y;
    near[1] = counted > 0 ? y - 1 : y;
    near[0] = counted > 1 ? y - 2 : near[1];
    near[3] = counted < last ? y + 1 : y;
    near[4] = counted < last - 1 ? y + 2 : near[3];
}

/* Blocks block_x0 - PCR_SMOOTH_REACH and so on of a row; the image's ends go on as they are. */
static void copy_dcs(const pcr_component *comp, const pcr_plane *plane, int y, int16_t *to) {
    const int16_t *from = comp->dc + (size_t)y * (size_t)comp->stride;
    int stop = (int)padded_count(plane) + PCR_SMOOTH_REACH, x = -PCR_SMOOTH_REACH;
    int last = comp->blocks_w - 1 - plane->block_x0;
    from += plane->block_x0;
    for (; x < 0 && plane->block_x0 + x < 0; x++) to[x] = from[-plane->block_x0];
    int end = pcr_min(stop, last + 1);
    if (end > x) memcpy(to + x, from + x, (size_t)(end - x) * sizeof *to);
    for (x = pcr_max(x, end); x < stop; x++) to[x] = from[last];
}

void pcr_smooth_row(const pcr_decoder *dec, int c, int block_row) {
    const pcr_component *comp = &dec->comp[c];
    const pcr_plane *plane = &dec->plan.planes[c];
    const pcr_smoothing *how = &plane->smoothing;
    int near[PCR_SMOOTH_ROWS];
    near_rows(dec, comp, block_row, near);
    for (int r = 0; r < PCR_SMOOTH_ROWS; r++) copy_dcs(comp, plane, near[r], how->rows[r]);
    const pcr_smooth_fn smooth = how->exact ? pcr_smooth_exact : dec->kernels->smooth;
    size_t first = (size_t)block_row * (size_t)comp->stride + (size_t)plane->block_x0;
    smooth(how, plane->block_x1 - plane->block_x0, comp->mask + first, comp->ac + 64 * first);
}
