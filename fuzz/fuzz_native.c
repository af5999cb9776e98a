/* libFuzzer harness: decodes the same bytes with both backends, and rescans them.
 *
 * The first 8 bytes choose the request, the rest is the stream. Besides what the sanitizers find,
 * the backends must agree on success, on every pixel and on a rescan, which must decode to the same
 * pixels, and a batch of a good and a cut stream must give what each gives alone, as several views
 * of one stream must.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pcr.h"

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

static pcr_request choose_request(const uint8_t *options, const pcr_header *header) {
    pcr_request request = {.max_pixels = MAX_PIXELS, .layout = options[0] & 1,
                           .color = (options[0] >> 1) % 3};
    request.smooth = options[1] >> 3 & 1;
    request.scale = options[0] & 8 ? 1 << (options[0] >> 4 & 3) : 0;
    if (options[1] & 1) {
        request.crop_y = options[2] * header->height / 256,
            request.crop_x = options[3] * header->width / 256;
        request.crop_h = 1 + options[4] * (header->height - request.crop_y - 1) / 255;
        request.crop_w = 1 + options[5] * (header->width - request.crop_x - 1) / 255;
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
            (request->color == PCR_OUT_GRAY ? 1 : request->color == PCR_OUT_CMYK ? 4 : 3);
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

static void check_rescan(const pcr_piece *pieces, size_t count, const pcr_header *header,
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
    int code = pcr_rescan(decoder, pieces, count, script, scans, &rescanned, &rescanned_size);
    size_t again_size;
    require(code == pcr_rescan(portable, pieces, count, script, scans, &again, &again_size) &&
                strcmp(pcr_message(decoder), pcr_message(portable)) == 0,
            "one backend refuses to rescan what the other rescans");
    if (code == PCR_OK) {
        require(rescanned_size == again_size && memcmp(rescanned, again, again_size) == 0,
                "the backends rescan differently");
        pcr_piece whole = {rescanned, rescanned_size};
        uint8_t *got = decode(PCR_BACKEND_PORTABLE, &whole, 1, request, &got_size);
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
    pcr_pool_add(pool, &batch);
    require(pcr_pool_wait(pool, &batch, 0), "a batch is not done");
    require(codes[0] == PCR_OK && memcmp(out, pixels, size) == 0, "the first of a batch differs");
    require(codes[2] == PCR_OK && memcmp(out + 2 * size, pixels, size) == 0,
            "the last of a batch differs");
    pcr_pool_stop(pool);
    pcr_pool_free(pool);
    free(out);
}

static int decodes_whole(const pcr_piece *pieces, size_t count, const pcr_request *request) {
    size_t size = 0;
    pcr_request whole = {.max_pixels = MAX_PIXELS, .color = request->color, .scale = 1};
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
    pcr_header header;
    pcr_decoder *decoder = pcr_decoder_new(PCR_BACKEND_AUTO);
    size_t count = split(data + OPTIONS, size - OPTIONS, data[0] & 128 ? 97 : 0, pieces),
        size_a = 0, size_b = 0;
    int refused = pcr_read_header(decoder, pieces, count, &header);
    pcr_decoder_free(decoder);
    if (!refused && (int64_t)header.height * header.width <= MAX_PIXELS) {
        pcr_request request = choose_request(data, &header);
        uint8_t *a = decode(PCR_BACKEND_AUTO, pieces, count, &request, &size_a);
        uint8_t *b = decode(PCR_BACKEND_PORTABLE, pieces, count, &request, &size_b);
        require((a == NULL) == (b == NULL), "one backend refuses what the other decodes");
        if (a) {
            require(size_a == size_b && memcmp(a, b, size_a) == 0, "the backends differ");
            check_batch(pieces, count, a, &request, size_a);
            check_views(pieces, count, a, &request, size_a);
            /* A rescan is complete, and nothing of it is smoothed. */
            if (!(data[1] & 4) && !request.smooth)
                check_rescan(pieces, count, &header, a, &request, size_a);
        }
        free(a);
        free(b);
    }
    for (size_t i = 0; i < count; i++) free((void *)pieces[i].data);
    return 0;
}
