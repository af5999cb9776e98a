/* What a request means for a frame: DCT scaling, pixel ranges, and which blocks they need. */
#include "pcr_internal.h"
#include "resize.h"

/* How stored pixels become upright ones, by EXIF orientation: columns are put last first, rows are
 * put last first, and then rows are put as columns. */
enum { COLUMNS_BACK = 1, ROWS_BACK = 2, TRANSPOSED = 4 };

static int turns(const pcr_decoder *dec, int orientation) {
    static const uint8_t each[9] = {0,
                                    0,
                                    COLUMNS_BACK,
                                    COLUMNS_BACK | ROWS_BACK,
                                    ROWS_BACK,
                                    TRANSPOSED,
                                    TRANSPOSED | ROWS_BACK,
                                    TRANSPOSED | COLUMNS_BACK | ROWS_BACK,
                                    TRANSPOSED | COLUMNS_BACK};
    return each[orientation ? orientation : dec->orientation];
}

int pcr_turned_size(pcr_decoder *dec, int orientation, int32_t *height, int32_t *width) {
    if (orientation < 0 || orientation > 8)
        return pcr_fail(dec, PCR_USAGE, "expected an EXIF orientation of 0 to 8, got %d",
                        orientation);
    bool transposed = turns(dec, orientation) & TRANSPOSED;
    *height = transposed ? dec->width : dec->height;
    *width = transposed ? dec->height : dec->width;
    return PCR_OK;
}

static void swap(int32_t *a, int32_t *b) {
    int32_t first = *a;
    *a = *b, *b = first;
}

/* From the picture as it is asked for to the one that is stored. */
static void turn_back(pcr_decoder *dec) {
    pcr_plan_state *plan = &dec->plan;
    pcr_request *r = &plan->request;
    int how = turns(dec, r->orientation);
    plan->transposed = how & TRANSPOSED;
    plan->rows_back = how & ROWS_BACK;
    plan->columns_back = how & COLUMNS_BACK;
    if (plan->transposed) {
        swap(&r->crop_y, &r->crop_x);
        swap(&r->crop_h, &r->crop_w);
        swap(&r->out_h, &r->out_w);
    }
    if (plan->rows_back) r->crop_y = dec->height - r->crop_y - r->crop_h;
    if (plan->columns_back) r->crop_x = dec->width - r->crop_x - r->crop_w;
    if (r->flip && plan->transposed) plan->rows_back = !plan->rows_back;
    if (r->flip && !plan->transposed) plan->columns_back = !plan->columns_back;
}

static int check_request(pcr_decoder *dec, pcr_request *r) {
    int32_t height = 0, width = 0;
    int code = pcr_turned_size(dec, r->orientation, &height, &width);
    if (code) return code;
    if (r->scale < 0 || r->scale > 8 || (r->scale & (r->scale - 1)))
        return pcr_fail(dec, PCR_USAGE, "expected a scale of 0, 1, 2, 4 or 8, got %d", r->scale);
    if (r->layout < PCR_LAYOUT_HWC || r->layout > PCR_LAYOUT_CHW || r->color < PCR_OUT_RGB ||
        r->color > PCR_OUT_GRAY)
        return pcr_fail(dec, PCR_USAGE, "expected a layout and a color of 0 or 1, got %d and %d",
                        r->layout, r->color);
    if (r->crop_h == 0 && r->crop_w == 0)
        r->crop_y = 0, r->crop_x = 0, r->crop_h = height, r->crop_w = width;
    if (r->crop_y < 0 || r->crop_x < 0 || r->crop_h < 1 || r->crop_w < 1 ||
        r->crop_h > height - r->crop_y || r->crop_w > width - r->crop_x)
        return pcr_fail(dec, PCR_USAGE,
                        "expected a crop (y, x, h, w) inside %dx%d pixels, got (%d, %d, %d, %d)",
                        height, width, r->crop_y, r->crop_x, r->crop_h, r->crop_w);
    if ((r->out_h || r->out_w) &&
        (r->out_h < 1 || r->out_w < 1 || r->out_h > 65535 || r->out_w > 65535))
        return pcr_fail(dec, PCR_USAGE, "expected a size (H, W) of 1 to 65535, got (%d, %d)",
                        r->out_h, r->out_w);
    return PCR_OK;
}

/* The strongest of libjpeg's scalings that leaves the crop at least as large as the target. */
static int choose_scale(const pcr_request *r) {
    if (r->scale) return r->scale;
    int scale = 8;
    while (r->out_h == 0
               ? scale > 1
               : scale > 1 && (r->crop_h < scale * r->out_h || r->crop_w < scale * r->out_w))
        scale /= 2;
    return scale;
}

/* Source samples that a resize from box0..box1 looks at: as pcr_filter_build finds them. */
static void filter_range(double box0, double box1, int out, int size, int *first, int *stop) {
    double scale = (box1 - box0) / out, width = scale > 1 ? scale : 1;
    *first = pcr_max((int)(box0 + 0.5 * scale - width + 0.5), 0);
    *stop = pcr_min((int)(box1 - 0.5 * scale + width + 0.5) + 1, size);
}

static void plan_range(pcr_decoder *dec) {
    pcr_plan_state *plan = &dec->plan;
    const pcr_request *r = &plan->request;
    int height = pcr_ceil_div(dec->height, plan->scale),
        width = pcr_ceil_div(dec->width, plan->scale);
    plan->box_y0 = (double)r->crop_y / plan->scale, plan->box_x0 = (double)r->crop_x / plan->scale;
    plan->box_y1 = plan->box_y0 + (double)r->crop_h / plan->scale;
    plan->box_x1 = plan->box_x0 + (double)r->crop_w / plan->scale;
    if (r->out_h) {
        plan->out_h = r->out_h, plan->out_w = r->out_w;
        filter_range(plan->box_y0, plan->box_y1, r->out_h, height, &plan->y0, &plan->y1);
        filter_range(plan->box_x0, plan->box_x1, r->out_w, width, &plan->x0, &plan->x1);
        return;
    }
    plan->y0 = r->crop_y / plan->scale, plan->x0 = r->crop_x / plan->scale;
    plan->y1 = pcr_ceil_div(r->crop_y + r->crop_h, plan->scale);
    plan->x1 = pcr_ceil_div(r->crop_x + r->crop_w, plan->scale);
    plan->out_h = plan->y1 - plan->y0, plan->out_w = plan->x1 - plan->x0;
}

/* Samples per block of a component: a subsampled one is scaled less (jdmaster.c). */
static int scaled_size(const pcr_decoder *dec, const pcr_component *comp, int smallest) {
    int size = smallest;
    while (size < 8 && dec->h_max * smallest % (comp->h * size * 2) == 0 &&
           dec->v_max * smallest % (comp->v * size * 2) == 0)
        size *= 2;
    return size;
}

/* Which of jdsample.c's methods libjpeg would take. */
static int upsampling(const pcr_plane *plane, int smallest) {
    bool fancy = smallest > 1;
    if (plane->up_h == 1 && plane->up_v == 1) return PCR_UP_NONE;
    if (plane->up_h == 2 && plane->up_v == 1 && fancy && plane->width > 2) return PCR_UP_H2V1;
    if (plane->up_h == 2 && plane->up_v == 2 && fancy && plane->width > 2) return PCR_UP_H2V2;
    if (plane->up_h == 1 && plane->up_v == 2 && fancy) return PCR_UP_H1V2;
    return PCR_UP_REPLICATE;
}

static int plan_plane(pcr_decoder *dec, int c) {
    const pcr_plan_state *plan = &dec->plan;
    const pcr_component *comp = &dec->comp[c];
    pcr_plane *plane = &dec->plan.planes[c];
    int smallest = 8 / plan->scale;
    int size = plane->size = scaled_size(dec, comp, smallest);
    if (dec->h_max * smallest % (comp->h * size) || dec->v_max * smallest % (comp->v * size))
        return pcr_fail(dec, PCR_UNSUPPORTED,
                        "expected integer upsampling factors, got %dx%d of %dx%d", comp->h, comp->v,
                        dec->h_max, dec->v_max);
    plane->up_h = dec->h_max * smallest / (comp->h * size);
    plane->up_v = dec->v_max * smallest / (comp->v * size);
    plane->width = pcr_ceil_div(dec->width * comp->h * size, dec->h_max * 8);
    plane->height = pcr_ceil_div(dec->height * comp->v * size, dec->v_max * 8);
    plane->kind = upsampling(plane, smallest);
    bool sideways = plane->kind == PCR_UP_H2V1 || plane->kind == PCR_UP_H2V2;
    bool upright = plane->kind == PCR_UP_H1V2 || plane->kind == PCR_UP_H2V2;
    int x0 = pcr_max(plan->x0 / plane->up_h - sideways, 0);
    int x1 = pcr_min(pcr_ceil_div(plan->x1, plane->up_h) + sideways, plane->width);
    plane->block_x0 = x0 / size, plane->block_x1 = pcr_ceil_div(x1, size);
    plane->next_block = pcr_max(plan->y0 / plane->up_v - upright, 0) / size;
    plane->ring_blocks = upright ? 2 : 1;
    plane->stride = ((size_t)(plane->block_x1 - plane->block_x0 + 1) * (size_t)size + 63) / 64 *
        64 + 2 * PCR_ROW_PAD;
    int last = pcr_min((plan->y1 - 1) / plane->up_v + upright, plane->height - 1) / size;
    if (plan->request.smooth && dec->progressive) last += PCR_SMOOTH_REACH;
    dec->rows_needed = pcr_max(dec->rows_needed, pcr_min(last / comp->v + 1, dec->mcus_h));
    return PCR_OK;
}

int pcr_plan_geometry(pcr_decoder *dec, const pcr_request *request) {
    pcr_plan_state *plan = &dec->plan;
    plan->request = *request;
    int code = check_request(dec, &plan->request);
    if (code) return code;
    turn_back(dec);
    plan->scale = choose_scale(&plan->request);
    plan->channels = request->color == PCR_OUT_GRAY ? 1 : 3;
    dec->rows_needed = 0;
    plan_range(dec);
    for (int c = 0; c < dec->num_components && !code; c++) code = plan_plane(dec, c);
    return code;
}

/* Which components the output color needs. */
void pcr_plan_color(pcr_decoder *dec) {
    bool luma = dec->plan.request.color == PCR_OUT_GRAY && dec->num_components < 4 &&
        dec->color != PCR_COLOR_RGB;
    for (int c = 0; c < dec->num_components; c++) {
        dec->comp[c].needed = c == 0 || !luma;
        dec->comp[c].dc_only = dec->plan.planes[c].size == 1;
    }
}
