/* libFuzzer harness: decodes the same bytes with both backends, and rescans them.
 *
 * The first 8 bytes choose the request, the rest is the stream. Besides what the sanitizers find,
 * the backends must agree on success, on every pixel and on a rescan, which must decode to the same
 * pixels; a picture that is turned or mirrored must be the stored one with its pixels in other
 * places; a batch of a good and a cut stream must give what each gives alone, and so must several
 * views of one stream, and crops that are drawn.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pcr_internal.h"

enum { OPTIONS = 8, MAX_SIDE = 96 };
#define MAX_PIXELS ((int64_t)1 << 20)

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

/* Up to 4 pieces, each in its own allocation so that reading past one is found. */
static size_t split(const uint8_t *data, size_t size, unsigned step, pcr_piece pieces[4]) {
    size_t count = 0;
    while (size > 0 && count < 4) {
        size_t take = count == 3 || step == 0 || step > size ? size : step;
        uint8_t *copy = malloc(take);
        require(copy != NULL, "no memory for a piece");
        memcpy(copy, data, take);
        pieces[count++] = (pcr_piece){copy, take};
        data += take, size -= take;
    }
    return count;
}

static pcr_request choose_request(const uint8_t *options, const pcr_decoder *header) {
    pcr_request request = {.max_pixels = MAX_PIXELS, .layout = options[0] & 1,
                           .color = options[0] >> 1 & 1};
    request.smooth = options[1] >> 3 & 1;
    request.orientation = options[1] >> 4 > 8 ? 0 : options[1] >> 4;
    request.flip = options[0] >> 6 & 1;
    /* A crop is one of the turned picture. */
    int orientation = request.orientation ? request.orientation : header->orientation,
        height = orientation > 4 ? header->width : header->height,
        width = orientation > 4 ? header->height : header->width;
    request.scale = options[0] & 8 ? 1 << (options[0] >> 4 & 3) : 0;
    if (options[1] & 1) {
        request.crop_y = options[2] * height / 256, request.crop_x = options[3] * width / 256;
        request.crop_h = 1 + options[4] * (height - request.crop_y - 1) / 255;
        request.crop_w = 1 + options[5] * (width - request.crop_x - 1) / 255;
    }
    if (options[1] & 2)
        request.out_h = 1 + options[6] % MAX_SIDE, request.out_w = 1 + options[7] % MAX_SIDE;
    return request;
}

/* Decoded pixels, or NULL. */
static uint8_t *decode(int backend, const pcr_piece *pieces, size_t count,
                       const pcr_request *request, size_t *size) {
    pcr_decoder *decoder = pcr_decoder_new(backend);
    int32_t height, width;
    uint8_t *out = NULL;
    require(decoder != NULL, "no decoder");
    if (pcr_output_size(decoder, pieces, count, request, &height, &width) == PCR_OK) {
        *size = (size_t)height * (size_t)width *
            (request->color == PCR_OUT_GRAY ? 1 : 3);
        out = malloc(*size);
        require(out != NULL, "no memory for pixels");
        if (pcr_decode(decoder, pieces, count, request, out, *size)) {
            require(pcr_message(decoder)[0] != 0, "an error without a message");
            free(out);
            out = NULL;
        }
    }
    pcr_decoder_free(decoder);
    return out;
}

/* Where a pixel of the turned picture is stored, by the definition of each orientation: (*y, *x) is
 * changed from the one to the other. The stored picture has height x width pixels. */
static void stored_place(int orientation, int height, int width, int *y, int *x) {
    int row = *y, column = *x;
    if (orientation > 4) *y = column, *x = row;
    if (orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7)
        *y = height - 1 - *y;
    if (orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8)
        *x = width - 1 - *x;
}

/* Turned and mirrored pixels against those of the same request for the stored picture. */
static void check_turned(const pcr_piece *pieces, size_t count, const pcr_decoder *header,
                         const uint8_t *pixels, const pcr_request *request, size_t size) {
    int turned = request->orientation ? request->orientation : header->orientation;
    int channels = request->color == PCR_OUT_GRAY ? 1 : 3;
    pcr_request plain = *request;
    plain.orientation = 1, plain.flip = 0;
    if (request->crop_h) {
        int y0 = request->crop_y, x0 = request->crop_x;
        int y1 = y0 + request->crop_h - 1, x1 = x0 + request->crop_w - 1;
        stored_place(turned, header->height, header->width, &y0, &x0);
        stored_place(turned, header->height, header->width, &y1, &x1);
        plain.crop_y = y0 < y1 ? y0 : y1, plain.crop_x = x0 < x1 ? x0 : x1;
        plain.crop_h = abs(y1 - y0) + 1, plain.crop_w = abs(x1 - x0) + 1;
    }
    if (turned > 4) plain.out_h = request->out_w, plain.out_w = request->out_h;
    pcr_decoder *decoder = pcr_decoder_new(PCR_BACKEND_AUTO);
    int32_t height, width;
    require(pcr_output_size(decoder, pieces, count, &plain, &height, &width) == PCR_OK,
            "a turned picture is decoded, the stored one refused");
    pcr_decoder_free(decoder);
    size_t stored_size = 0;
    uint8_t *stored = decode(PCR_BACKEND_AUTO, pieces, count, &plain, &stored_size);
    require(stored != NULL && stored_size == size, "the stored picture has another size");
    int out_h = turned > 4 ? width : height, out_w = turned > 4 ? height : width;
    int chw = request->layout == PCR_LAYOUT_CHW;
    size_t pixel = chw ? 1 : (size_t)channels, plane = chw ? size / (size_t)channels : 1;
    for (int row = 0; row < out_h; row++)
        for (int column = 0; column < out_w; column++) {
            int y = row, x = request->flip ? out_w - 1 - column : column;
            stored_place(turned, height, width, &y, &x);
            for (size_t c = 0; c < (size_t)channels; c++) {
                size_t to = (size_t)(row * out_w + column) * pixel + c * plane;
                size_t from = (size_t)(y * width + x) * pixel + c * plane;
                require(pixels[to] == stored[from], "a pixel is not where the orientation says");
            }
        }
    free(stored);
}

static void check_rescan(const pcr_piece *pieces, size_t count, const pcr_decoder *header,
                         const uint8_t *pixels, const pcr_request *request, size_t size) {
    pcr_scan_spec script[12] =
        {{.num_components = header->num_components, .component = {0, 1, 2, 3}, .al = 1}};
    size_t scans = 1, rescanned_size, got_size = 0;
    for (int c = 0; c < header->num_components; c++) {
        script[scans++] = (pcr_scan_spec){.num_components = 1, .component = {c}, .ss = 1, .se = 63,
                                          .al = 1};
        script[scans++] = (pcr_scan_spec){.num_components = 1, .component = {c}, .ss = 1, .se = 63,
                                          .ah = 1};
    }
    script[scans++] = (pcr_scan_spec){.num_components = header->num_components,
                                      .component = {0, 1, 2, 3}, .ah = 1};
    pcr_decoder *decoder = pcr_decoder_new(PCR_BACKEND_AUTO),
                *portable = pcr_decoder_new(PCR_BACKEND_PORTABLE);
    const uint8_t *rescanned, *again;
    pcr_scan_place places[12];
    const pcr_loss_weights weights = {{1, .5, .5, .25}, {.25, .25, 0, .25, .25}};
    int code = pcr_rescan(decoder, pieces, count, script, scans, &weights, places, &rescanned,
                          &rescanned_size);
    size_t again_size;
    require(code == pcr_rescan(portable, pieces, count, script, scans, &weights, places, &again,
                               &again_size) &&
                strcmp(pcr_message(decoder), pcr_message(portable)) == 0,
            "one backend refuses to rescan what the other rescans");
    if (code == PCR_OK) {
        require(places[scans - 1].loss > -1e-6 && places[scans - 1].loss < 1e-6,
                "a whole image has lost something");
        require(rescanned_size == again_size && memcmp(rescanned, again, again_size) == 0,
                "the backends rescan differently");
        pcr_piece whole = {rescanned, rescanned_size};
        pcr_request same = *request; /* a rescan has no metadata */
        if (!same.orientation) same.orientation = header->orientation;
        uint8_t *got = decode(PCR_BACKEND_PORTABLE, &whole, 1, &same, &got_size);
        require(got != NULL && got_size == size && memcmp(got, pixels, size) == 0,
                "a rescan changed the pixels");
        free(got);
    }
    pcr_decoder_free(decoder);
    pcr_decoder_free(portable);
}

/* The same stream, without its last piece, and again: the first and the third have the pixels,
 * whatever becomes of the second. */
static void check_batch(const pcr_piece *pieces, size_t count, const uint8_t *pixels,
                        const pcr_request *request, size_t size) {
    pcr_piece three[12];
    int32_t boxes[3][5], codes[3];
    for (size_t i = 0; i < 3 * count; i++) three[i] = pieces[i % count];
    three[2 * count - 1].size = 0;
    for (int i = 0; i < 3; i++)
        memcpy(boxes[i],
               (int32_t[]){request->crop_y, request->crop_x, request->crop_h, request->crop_w,
                           request->flip},
               sizeof boxes[i]);
    uint8_t *out = malloc(3 * size);
    require(out != NULL, "no memory for a batch");
    pcr_view view = {.request = *request, .out = out, .out_size = size, .step = size};
    pcr_batch batch = {.pieces = three,
                       .num_pieces = count,
                       .num_images = 3,
                       .views = &view,
                       .num_views = 1,
                       .boxes = boxes[0],
                       .codes = codes};
    pcr_pool *pool = pcr_pool_new(0, PCR_BACKEND_AUTO);
    require(pcr_pool_add(pool, &batch) == PCR_OK, "a batch is refused");
    require(pcr_pool_wait(pool, &batch, 0), "a batch is not done");
    require(codes[0] == PCR_OK && memcmp(out, pixels, size) == 0, "the first of a batch differs");
    require(codes[2] == PCR_OK && memcmp(out + 2 * size, pixels, size) == 0,
            "the last of a batch differs");
    /* Crops that are drawn, in another order, each of an orientation of its own; the last one is
     * decoded again as it was drawn, unless it saw damage that the first did not. */
    const pcr_draw draw = {PCR_CROP_RANDOM, {0.08, 1}, {0.75, 1.5}, 0.5};
    const int32_t order[3] = {2, 0, 1};
    const uint8_t orientations[3] = {8, 9, (uint8_t)(size % 9)};
    const uint64_t states[3] = {size, 1, pixels[0]};
    if (request->out_h) {
        batch.order = order, batch.orientations = orientations;
        batch.draws = &draw, batch.states = states;
        require(pcr_pool_add(pool, &batch) == PCR_OK, "a drawn batch is refused");
        require(pcr_pool_wait(pool, &batch, 0), "a drawn batch is not done");
        require(codes[1] != PCR_OK, "there is no orientation 9");
        pcr_request drawn = *request;
        size_t drawn_size = 0;
        drawn.crop_y = boxes[2][0], drawn.crop_x = boxes[2][1];
        drawn.crop_h = boxes[2][2], drawn.crop_w = boxes[2][3], drawn.flip = boxes[2][4];
        drawn.orientation = orientations[2];
        uint8_t *alone = decode(PCR_BACKEND_AUTO, pieces, count, &drawn, &drawn_size);
        require((codes[2] == PCR_OK) == (alone != NULL), "a drawn crop is refused, or not, alone");
        require(!alone || memcmp(out + 2 * size, alone, size) == 0, "a drawn crop differs");
        free(alone);
    }
    pcr_pool_stop(pool);
    pcr_pool_free(pool);
    free(out);
}

static int decodes_whole(const pcr_piece *pieces, size_t count, const pcr_request *request) {
    size_t size = 0;
    pcr_request whole = {.max_pixels = MAX_PIXELS, .color = request->color, .scale = 1,
                         .orientation = 1};
    uint8_t *pixels = decode(PCR_BACKEND_AUTO, pieces, count, &whole, &size);
    int decoded = pixels != NULL;
    free(pixels);
    return decoded;
}

/* The same picture, a small one of the whole, and the same again: each as if it were alone. The
 * second may be refused, for damage in rows that the first does not look at; so are all then. So
 * are all, too, for damage that neither looks at alone: below the crop, in scans that the small one
 * does without. */
static void check_views(const pcr_piece *pieces, size_t count, const uint8_t *pixels,
                        const pcr_request *request, size_t size) {
    enum { SIDE = 24 };
    pcr_request small = *request;
    small.crop_y = small.crop_x = small.crop_h = small.crop_w = small.scale = 0;
    small.out_h = small.out_w = SIDE;
    size_t small_size = 0;
    uint8_t *expected = decode(PCR_BACKEND_AUTO, pieces, count, &small, &small_size);
    if (!expected) small_size = 3 * SIDE * SIDE;
    uint8_t *out = malloc(2 * size + small_size);
    require(out != NULL, "no memory for views");
    memset(out, 0xA5, 2 * size + small_size);
    const pcr_view views[3] = {{*request, out, size},
                               {small, out + size, small_size},
                               {*request, out + size + small_size, size}};
    pcr_decoder *decoder = pcr_decoder_new(PCR_BACKEND_AUTO);
    int refused = pcr_decode_views(decoder, pieces, count, views, 3);
    require(refused ? !expected || !decodes_whole(pieces, count, request) : expected != NULL,
            "views are refused, or decoded, unlike each alone");
    if (!refused) {
        require(memcmp(out, pixels, size) == 0, "the first view differs");
        require(memcmp(out + size, expected, small_size) == 0, "the second view differs");
        require(memcmp(out + size + small_size, pixels, size) == 0, "the third view differs");
    }
    pcr_decoder_free(decoder);
    free(out);
    free(expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < OPTIONS) return 0;
    pcr_piece pieces[4];
    pcr_decoder *header = pcr_decoder_new(PCR_BACKEND_AUTO);
    size_t count = split(data + OPTIONS, size - OPTIONS, data[0] & 128 ? 97 : 0, pieces),
        size_a = 0, size_b = 0;
    if (pcr_open(header, pieces, count, MAX_PIXELS) == PCR_OK) {
        pcr_request request = choose_request(data, header);
        uint8_t *a = decode(PCR_BACKEND_AUTO, pieces, count, &request, &size_a);
        uint8_t *b = decode(PCR_BACKEND_PORTABLE, pieces, count, &request, &size_b);
        require((a == NULL) == (b == NULL), "one backend refuses what the other decodes");
        if (a) {
            require(size_a == size_b && memcmp(a, b, size_a) == 0, "the backends differ");
            /* A forced scale without a size rounds crops outward, differently from each side. */
            if (request.out_h || request.scale <= 1)
                check_turned(pieces, count, header, a, &request, size_a);
            check_batch(pieces, count, a, &request, size_a);
            check_views(pieces, count, a, &request, size_a);
            /* A rescan is complete, and nothing of it is smoothed. */
            if (!(data[1] & 4) && !request.smooth)
                check_rescan(pieces, count, header, a, &request, size_a);
        }
        free(a);
        free(b);
    }
    pcr_decoder_free(header);
    for (size_t i = 0; i < count; i++) free((void *)pieces[i].data);
    return 0;
}
