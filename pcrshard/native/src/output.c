/* Coefficients to pixels, a row at a time: transform, upsample, convert, resize, all within the
 * cache. */
#include "pcr_internal.h"
#include "pixels.h"
#include "resize.h"
#include "smooth.h"

/* Rows that are put as columns together, so that each line of the cache is written a few times. */
enum { BAND_ROWS = 32 };

static size_t align(size_t n) { return (n + 63) / 64 * 64; }

static bool in_use(const pcr_decoder *dec, int c) { return dec->comp[c].needed; }

/* Bytes of an output-wide row, with room for vector loads, and for the pair before an odd start. */
static size_t row_bytes(const pcr_plan_state *plan) {
    return align((size_t)(plan->x1 - plan->x0) + 16) + 2 * PCR_ROW_PAD;
}

static size_t ring_bytes(const pcr_plane *plane) {
    return plane->stride * (size_t)(plane->ring_blocks * plane->size);
}

static int reserve_rows(pcr_decoder *dec) {
    pcr_plan_state *plan = &dec->plan;
    size_t row = row_bytes(plan), out_row = align((size_t)plan->out_w) + 2 * PCR_ROW_PAD, size = 0;
    size_t temp = row > out_row ? row : out_row;
    size_t band = plan->transposed ? BAND_ROWS * (size_t)plan->channels * out_row : 0;
    for (int c = 0; c < dec->num_components; c++)
        if (in_use(dec, c))
            size += ring_bytes(&plan->planes[c]) + row + pcr_smoothing_bytes(&plan->planes[c]);
    int code = pcr_reserve(dec, &dec->rows, size + 3 * temp + band);
    if (code) return code;
    uint8_t *at = dec->rows.data;
    for (int c = 0; c < dec->num_components; c++) {
        pcr_plane *plane = &plan->planes[c];
        if (!in_use(dec, c)) continue;
        plane->data = at + PCR_ROW_PAD;
        at += ring_bytes(plane);
        plane->upsampled = at + PCR_ROW_PAD;
        at += row;
        pcr_place_smoothing(plane, at);
        at += pcr_smoothing_bytes(plane);
    }
    for (int c = 0; c < 3; c++, at += temp) plan->temp[c] = at + PCR_ROW_PAD;
    plan->band = at + PCR_ROW_PAD;
    return PCR_OK;
}

/* Sample `x` of row `y`, which must be in the ring. */
static uint8_t *sample_at(const pcr_plane *plane, int y, int x) {
    int row = y % (plane->ring_blocks * plane->size);
    return plane->data + (size_t)row * plane->stride + (x - plane->block_x0 * plane->size);
}

static pcr_idct_fn choose_idct(const pcr_kernels *kernels, int size) {
    return size == 8   ? kernels->idct8
           : size == 4 ? kernels->idct4
           : size == 2 ? kernels->idct2
                       : kernels->idct1;
}

/* The triangle filter looks one sample beyond either end and finds the end's own value there. */
static void pad_ends(const pcr_plane *plane, int block_row) {
    for (int y = block_row * plane->size; y < (block_row + 1) * plane->size; y++) {
        if (plane->block_x0 == 0) *(sample_at(plane, y, 0) - 1) = *sample_at(plane, y, 0);
        if (plane->width <= plane->block_x1 * plane->size)
            *sample_at(plane, y, plane->width) = *sample_at(plane, y, plane->width - 1);
    }
}

/* Transforms the next row of blocks of a component. */
static void transform_row(pcr_decoder *dec, int c) {
    const pcr_plane *plane = &dec->plan.planes[c];
    const pcr_component *comp = &dec->comp[c];
    const pcr_smoothing *smooth = &plane->smoothing;
    const pcr_idct_fn idct = choose_idct(dec->kernels, plane->size);
    int count = plane->block_x1 - plane->block_x0;
    uint8_t *dst = sample_at(plane, plane->next_block * plane->size,
                             plane->block_x0 * plane->size);
    if (smooth->on) {
        pcr_smooth_row(dec, c, plane->next_block);
        idct(dst, plane->stride, smooth->dc, smooth->mask, smooth->ac, comp->quant, count);
        return;
    }
    size_t first = (size_t)(plane->next_block % comp->rows) * (size_t)comp->stride +
        (size_t)plane->block_x0;
    idct(dst, plane->stride, comp->dc + first, comp->mask + first, comp->ac + 64 * first,
         comp->quant, count);
}

/* Transforms block rows until row `y` of the component is in the ring. */
static int ensure_samples(pcr_decoder *dec, int c, int y) {
    pcr_plane *plane = &dec->plan.planes[c];
    for (; plane->next_block <= y / plane->size; plane->next_block++) {
        int code = pcr_ensure_rows(dec, plane->next_block / dec->comp[c].v);
        if (code) return code;
        transform_row(dec, c);
        if (plane->kind == PCR_UP_H2V1 || plane->kind == PCR_UP_H2V2)
            pad_ends(plane, plane->next_block);
    }
    return PCR_OK;
}

/* Output row `y` of one component at full width; *row points at output pixel x0. */
static int component_row(pcr_decoder *dec, int c, int y, const uint8_t **row) {
    const pcr_plan_state *plan = &dec->plan;
    const pcr_plane *plane = &plan->planes[c];
    int near = y / plane->up_v, far = near, below = 0;
    if (plane->kind == PCR_UP_H2V2 || plane->kind == PCR_UP_H1V2) {
        below = y & 1;
        far = pcr_min(pcr_max(below ? near + 1 : near - 1, 0), plane->height - 1);
    }
    int code = ensure_samples(dec, c, pcr_max(near, far));
    if (code) return code;
    int x0 = plan->x0 / plane->up_h, count = pcr_ceil_div(plan->x1, plane->up_h) - x0;
    const uint8_t *near_row = sample_at(plane, near, x0), *far_row = sample_at(plane, far, x0);
    const pcr_kernels *k = dec->kernels;
    *row = plane->upsampled + (plan->x0 - x0 * plane->up_h);
    switch (plane->kind) {
    case PCR_UP_NONE: *row = near_row; break;
    case PCR_UP_H2V1: k->up_h2v1(plane->upsampled, near_row, far_row, count, below); break;
    case PCR_UP_H2V2: k->up_h2v2(plane->upsampled, near_row, far_row, count, below); break;
    case PCR_UP_H1V2: k->up_h1v2(plane->upsampled, near_row, far_row, count, below); break;
    default: pcr_replicate(plane->upsampled, near_row, count, plane->up_h);
    }
    return PCR_OK;
}

/* One row per output channel, made in dst[] where it is not there already. */
static void convert_row(pcr_decoder *dec, const uint8_t *const src[4], uint8_t *const dst[3],
                        const uint8_t *row[3]) {
    const pcr_plan_state *plan = &dec->plan;
    int count = plan->x1 - plan->x0;
    bool gray = plan->channels == 1, ycck = dec->color == PCR_COLOR_YCCK;
    for (int c = 0; c < 3; c++) row[c] = src[dec->num_components == 1 ? 0 : c];
    if (ycck || (dec->color == PCR_COLOR_YCC && !gray)) {
        dec->kernels->ycc_rgb_chw(dst, src, count);
        for (int c = 0; c < 3; c++) row[c] = dst[c];
    }
    if (dec->num_components == 4) {
        pcr_cmyk_rgb(dst, row, src[3], count, ycck);
        for (int c = 0; c < 3; c++) row[c] = dst[c];
    }
    if (gray && (dec->num_components == 4 || dec->color == PCR_COLOR_RGB)) {
        pcr_rgb_gray(dst[0], row, count);
        row[0] = dst[0];
    }
}

/* Planes of the output, one after the other; each has pixels of pixel_bytes. */
static int num_planes(const pcr_plan_state *plan) {
    return plan->request.layout == PCR_LAYOUT_CHW ? plan->channels : 1;
}

static size_t pixel_bytes(const pcr_plan_state *plan) {
    return (size_t)(plan->channels / num_planes(plan));
}

/* A row of a band; of all planes they are as far apart as the longest needs. */
static uint8_t *band_row(const pcr_plan_state *plan, int plane, int y) {
    size_t pitch = (align((size_t)plan->out_w) + 2 * PCR_ROW_PAD) * pixel_bytes(plan);
    return plan->band + (size_t)(plane * BAND_ROWS + y % BAND_ROWS) * pitch;
}

/* Where row `y` of a plane is to be written, before finish_row. */
static uint8_t *row_at(const pcr_plan_state *plan, uint8_t *out, int plane, int y) {
    if (plan->transposed) return band_row(plan, plane, y);
    int place = plan->rows_back ? plan->out_h - 1 - y : y;
    return out +
        ((size_t)plane * (size_t)plan->out_h + (size_t)place) * (size_t)plan->out_w *
        pixel_bytes(plan);
}

static void swap_pixels(uint8_t *a, uint8_t *b, size_t size) {
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = a[i];
        a[i] = b[i], b[i] = byte;
    }
}

/* Last pixel first, in place. */
static void reverse(uint8_t *row, int width, size_t size) {
    int left = 0, right = width - 1;
    if (size == 1)
        for (; right - left >= 15; left += 8, right -= 8) {
            uint64_t first, last;
            memcpy(&first, row + left, 8), memcpy(&last, row + right - 7, 8);
            first = __builtin_bswap64(first), last = __builtin_bswap64(last);
            memcpy(row + left, &last, 8), memcpy(row + right - 7, &first, 8);
        }
    for (; left < right; left++, right--)
        swap_pixels(row + (size_t)left * size, row + (size_t)right * size, size);
}

/* Puts the rows of the band, which end with row `y`, as columns of a plane. */
static void put_band(const pcr_plan_state *plan, uint8_t *out, int plane, int y) {
    const uint8_t *from[BAND_ROWS];
    int count = y % BAND_ROWS + 1, first = plan->rows_back ? plan->out_h - 1 - y : y - count + 1;
    size_t size = pixel_bytes(plan), pitch = (size_t)plan->out_h * size;
    for (int i = 0; i < count; i++)
        from[i] = band_row(plan, plane, plan->rows_back ? y - i : y - count + 1 + i);
    uint8_t *to = out + (size_t)plane * (size_t)plan->out_w * pitch + (size_t)first * size;
    for (int x = 0; x < plan->out_w; x++) {
        uint8_t *row = to + (size_t)(plan->columns_back ? plan->out_w - 1 - x : x) * pitch;
        if (size == 1)
            for (int i = 0; i < count; i++) row[i] = from[i][x];
        else
            for (int i = 0; i < count; i++) memcpy(row + 3 * i, from[i] + 3 * x, 3);
    }
}

/* Row `y` is where row_at says: what is left to do so that it is as the orientation wants it. */
static void finish_row(const pcr_plan_state *plan, uint8_t *out, int y) {
    bool full = y % BAND_ROWS == BAND_ROWS - 1 || y == plan->out_h - 1;
    for (int plane = 0; plane < num_planes(plan); plane++) {
        if (plan->transposed && full) put_band(plan, out, plane, y);
        if (!plan->transposed && plan->columns_back)
            reverse(row_at(plan, out, plane, y), plan->out_w, pixel_bytes(plan));
    }
}

/* Row `y` of the output from its channels. */
static void put_row(const pcr_decoder *dec, uint8_t *out, int y, const uint8_t *const row[3]) {
    const pcr_plan_state *plan = &dec->plan;
    if (num_planes(plan) == plan->channels) {
        for (int c = 0; c < plan->channels; c++) {
            uint8_t *to = row_at(plan, out, c, y);
            if (to != row[c]) memcpy(to, row[c], (size_t)plan->out_w);
        }
    } else {
        uint8_t *to = row_at(plan, out, 0, y);
        dec->kernels->interleave3(&to, row, plan->out_w);
    }
    finish_row(plan, out, y);
}

static int source_rows(pcr_decoder *dec, int y, const uint8_t *src[4]) {
    for (int c = 0; c < dec->num_components; c++) {
        src[c] = NULL;
        int code = in_use(dec, c) ? component_row(dec, c, y, &src[c]) : PCR_OK;
        if (code) return code;
    }
    return PCR_OK;
}

static int output_whole(pcr_decoder *dec, uint8_t *out) {
    const pcr_plan_state *plan = &dec->plan;
    bool chw = plan->request.layout == PCR_LAYOUT_CHW;
    bool direct = !chw && plan->channels == 3 && dec->color == PCR_COLOR_YCC;
    for (int y = 0; y < plan->out_h; y++) {
        const uint8_t *src[4] = {NULL}, *row[3];
        uint8_t *dst[3];
        int code = source_rows(dec, plan->y0 + y, src);
        if (code) return code;
        if (direct) {
            uint8_t *to = row_at(plan, out, 0, y);
            dec->kernels->ycc_rgb_hwc(&to, src, plan->out_w);
            finish_row(plan, out, y);
            continue;
        }
        for (int c = 0; c < 3; c++)
            dst[c] = chw && c < plan->channels ? row_at(plan, out, c, y) : plan->temp[c];
        convert_row(dec, src, dst, row);
        put_row(dec, out, y, row);
    }
    return PCR_OK;
}

/* Rows of the source, resized across, in dec->output: [row][channel][sample]. */
static int resize_across(pcr_decoder *dec, const pcr_filter *across, size_t pitch) {
    const pcr_plan_state *plan = &dec->plan;
    uint8_t *to = dec->output.data;
    for (int y = plan->y0; y < plan->y1; y++) {
        const uint8_t *src[4] = {NULL}, *row[3];
        int code = source_rows(dec, y, src);
        if (code) return code;
        convert_row(dec, src, plan->temp, row);
        for (int c = 0; c < plan->channels; c++, to += pitch) {
            bool repeated = c > 0 && row[c] == row[c - 1];
            if (repeated)
                memcpy(to, to - pitch, pitch);
            else
                dec->kernels->resize_row(to, row[c] + (across->first - plan->x0), across);
        }
    }
    return PCR_OK;
}

static void resize_down(pcr_decoder *dec, const pcr_filter *down, size_t pitch, uint8_t *out) {
    const pcr_plan_state *plan = &dec->plan;
    size_t stride = pitch * (size_t)plan->channels;
    for (int y = 0; y < plan->out_h; y++) {
        const uint8_t *from = dec->output.data +
            (size_t)(down->start[y] + down->first - plan->y0) * stride, *row[3];
        const int16_t *weights = down->weights + (size_t)y * (size_t)down->stride;
        /* The zero weights that pad an output may lie beyond the last row. */
        int taps = pcr_min(down->stride, plan->y1 - down->first - down->start[y]);
        for (int c = 0; c < plan->channels; c++, from += pitch) {
            uint8_t *to = num_planes(plan) == plan->channels ? row_at(plan, out, c, y)
                                                             : plan->temp[c];
            dec->kernels->resize_column(to, from, stride, weights, taps, plan->out_w);
            row[c] = to;
        }
        put_row(dec, out, y, row);
    }
}

static int output_resized(pcr_decoder *dec, uint8_t *out) {
    pcr_plan_state *plan = &dec->plan;
    pcr_filter across, down;
    size_t pitch = align((size_t)plan->out_w) + PCR_ROW_PAD;
    size_t across_bytes = align(pcr_filter_size(plan->box_x0, plan->box_x1, plan->out_w));
    size_t down_bytes = pcr_filter_size(plan->box_y0, plan->box_y1, plan->out_h);
    int code = pcr_reserve(dec, &dec->filters, across_bytes + down_bytes);
    if (!code)
        code = pcr_reserve(dec, &dec->output,
                           pitch * (size_t)plan->channels * (size_t)(plan->y1 - plan->y0));
    if (code) return code;
    /* Rows that stay rows are mirrored by their filter. */
    bool mirrored = plan->columns_back && !plan->transposed;
    if (mirrored) plan->columns_back = false;
    pcr_filter_build(&across, dec->filters.data, pcr_ceil_div(dec->width, plan->scale),
                     plan->box_x0, plan->box_x1, plan->out_w, true, mirrored);
    pcr_filter_build(&down, dec->filters.data + across_bytes,
                     pcr_ceil_div(dec->height, plan->scale), plan->box_y0, plan->box_y1,
                     plan->out_h, false, false);
    code = resize_across(dec, &across, pitch);
    if (!code) resize_down(dec, &down, pitch, out);
    return code;
}

int pcr_output(pcr_decoder *dec, uint8_t *out) {
    pcr_plan_smoothing(dec);
    int code = reserve_rows(dec);
    if (code) return code;
    return dec->plan.request.out_h ? output_resized(dec, out) : output_whole(dec, out);
}
