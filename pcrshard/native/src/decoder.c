/* The decoder object and its public calls. */
#include <stdlib.h>

#include "pcr_internal.h"

static const pcr_kernels *choose_kernels(int backend) {
#if PCR_HAVE_VECTORS
    if (backend == PCR_BACKEND_AUTO && pcr_have_vectors()) return &pcr_kernels_vector;
#endif
    (void)backend;
    return &pcr_kernels_portable;
}

pcr_decoder *pcr_decoder_new(int backend) {
    pcr_decoder *dec = calloc(1, sizeof *dec);
    if (dec) dec->kernels = choose_kernels(backend);
    return dec;
}

static void drop(pcr_buffer *buffer, size_t above) {
    if (buffer->capacity <= above) return;
    free(buffer->data);
    *buffer = (pcr_buffer){0};
}

static void drop_but_output(pcr_decoder *dec, size_t above) {
    drop(&dec->coefficients, above);
    drop(&dec->segment, above);
    drop(&dec->payload, above);
    drop(&dec->exif, above);
    drop(&dec->filters, above);
    drop(&dec->rows, above);
}

void pcr_trim_but_output(pcr_decoder *dec) { drop_but_output(dec, PCR_KEEP_BYTES); }

void pcr_trim(pcr_decoder *dec) {
    pcr_trim_but_output(dec);
    drop(&dec->output, PCR_KEEP_BYTES);
}

int pcr_finish(pcr_decoder *dec, int code) {
    pcr_trim(dec);
    return code;
}

void pcr_decoder_free(pcr_decoder *dec) {
    if (!dec) return;
    drop_but_output(dec, 0);
    drop(&dec->output, 0);
    free(dec);
}

const char *pcr_decoder_backend(const pcr_decoder *dec) { return dec->kernels->name; }

int pcr_open(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces, int64_t max_pixels) {
    bool found = false;
    pcr_start_stream(dec, pieces, num_pieces);
    dec->want_all = false;
    if (max_pixels > 0) dec->max_pixels = max_pixels;
    int code = pcr_parse_frame(dec);
    if (!code) code = pcr_check_payable(dec);
    if (!code) code = pcr_parse_to_scan(dec, &found);
    if (!code && !found) code = pcr_fail(dec, PCR_CORRUPT, "expected at least one scan, got none");
    return code;
}

static int output_size(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                       const pcr_request *request, int32_t *height, int32_t *width) {
    int code = pcr_open(dec, pieces, num_pieces, request->max_pixels);
    if (!code) code = pcr_plan_geometry(dec, request);
    if (code) return code;
    const pcr_plan_state *plan = &dec->plan;
    *height = plan->transposed ? plan->out_w : plan->out_h;
    *width = plan->transposed ? plan->out_h : plan->out_w;
    /* A size that the caller requests is not a claim of the stream. */
    if (!plan->request.out_h)
        dec->output_bytes =
            (uint64_t)plan->out_h * (uint64_t)plan->out_w * (uint64_t)plan->channels;
    return pcr_check_memory(dec, dec->output_bytes);
}

int pcr_output_size(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                    const pcr_request *request, int32_t *height, int32_t *width) {
    return pcr_finish(dec, output_size(dec, pieces, num_pieces, request, height, width));
}

/* Everything about a view but its pixels. */
static int plan_view(pcr_decoder *dec, const pcr_view *view) {
    const pcr_plan_state *plan = &dec->plan;
    int code = pcr_plan_geometry(dec, &view->request);
    if (code) return code;
    size_t need = (size_t)plan->out_h * (size_t)plan->out_w * (size_t)plan->channels;
    if (view->out_size != need)
        return pcr_fail(dec, PCR_USAGE, "expected room for %zu bytes, got %zu", need,
                        view->out_size);
    pcr_plan_color(dec);
    return PCR_OK;
}

/* Plans all views; a coefficient is read if any of them needs it. */
static int plan_views(pcr_decoder *dec, const pcr_view *views, size_t num_views) {
    bool needed[PCR_MAX_COMPONENTS] = {false}, more[PCR_MAX_COMPONENTS] = {false};
    int rows = 0;
    for (size_t i = 0; i < num_views; i++) {
        int code = plan_view(dec, &views[i]);
        if (code) return code;
        rows = pcr_max(rows, dec->rows_needed);
        /* A size that the caller requests is not a claim of the stream. */
        if (!dec->plan.request.out_h) dec->output_bytes += views[i].out_size;
        for (int c = 0; c < dec->num_components; c++) {
            needed[c] |= dec->comp[c].needed;
            more[c] |= dec->comp[c].needed && !dec->comp[c].dc_only;
        }
    }
    dec->rows_needed = rows;
    for (int c = 0; c < dec->num_components; c++)
        dec->comp[c].needed = needed[c], dec->comp[c].dc_only = !more[c];
    return pcr_check_memory(dec, dec->output_bytes);
}

int pcr_decode_opened(pcr_decoder *dec, const pcr_view *views, size_t num_views) {
    dec->keep_rows = num_views > 1;
    int code = plan_views(dec, views, num_views);
    if (!code) code = pcr_read_scans(dec);
    for (size_t i = 0; i < num_views && !code; i++) {
        code = plan_view(dec, &views[i]);
        if (!code) code = pcr_output(dec, views[i].out);
    }
    return pcr_finish(dec, code);
}

int pcr_decode_views(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
                     const pcr_view *views, size_t num_views) {
    if (num_views < 1 || num_views > PCR_MAX_VIEWS)
        return pcr_fail(dec, PCR_USAGE, "expected 1 to %d views, got %zu", PCR_MAX_VIEWS,
                        num_views);
    int code = pcr_open(dec, pieces, num_pieces, views->request.max_pixels);
    return code ? pcr_finish(dec, code) : pcr_decode_opened(dec, views, num_views);
}

int pcr_decode(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
               const pcr_request *request, uint8_t *out, size_t out_size) {
    pcr_view view = {.request = *request, .out = out, .out_size = out_size};
    return pcr_decode_views(dec, pieces, num_pieces, &view, 1);
}
