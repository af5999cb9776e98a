/* pcrshard's native core: progressive and baseline JPEG to pixels, and lossless rescan.
 *
 * The only header that callers include. No globals: all state lives in a decoder, which one thread
 * at a time may use. Every function that can fail returns a PCR_* code; pcr_message() explains it.
 */
#ifndef PCR_H
#define PCR_H

#include <stddef.h>
#include <stdint.h>

enum {
    PCR_OK = 0,
    PCR_CORRUPT = 1,
    PCR_UNSUPPORTED = 2,
    PCR_LIMIT = 3,
    PCR_MEMORY = 4,
    PCR_USAGE = 5
};
enum { PCR_BACKEND_AUTO = 0, PCR_BACKEND_PORTABLE = 1 };
enum {
    PCR_COLOUR_GRAY = 0,
    PCR_COLOUR_YCC = 1,
    PCR_COLOUR_RGB = 2,
    PCR_COLOUR_CMYK = 3,
    PCR_COLOUR_YCCK = 4
};
enum { PCR_OUT_RGB = 0, PCR_OUT_GRAY = 1, PCR_OUT_CMYK = 2 };
enum { PCR_LAYOUT_HWC = 0, PCR_LAYOUT_CHW = 1 };

enum { PCR_MAX_VIEWS = 64 };

enum { PCR_CROP_NONE = 0, PCR_CROP_CENTER = 1, PCR_CROP_RANDOM = 2 };

enum { PCR_FLOAT32 = 0, PCR_BFLOAT16 = 1 };

typedef struct pcr_decoder pcr_decoder;

/* One run of the JPEG's bytes; a stream is an array of them, in order. */
typedef struct {
    const uint8_t *data;
    size_t size;
} pcr_piece;

typedef struct {
    int32_t height, width, num_components;
    int32_t h[4], v[4];
    int32_t progressive;
    int32_t colour; /* PCR_COLOUR_* */
} pcr_header;

/* What to decode. crop_h == 0: the whole image; out_h == 0: no resize. */
typedef struct {
    int32_t crop_y, crop_x, crop_h, crop_w;
    int32_t out_h, out_w;
    int32_t layout, colour; /* PCR_LAYOUT_*, PCR_OUT_* */
    int32_t scale;          /* DCT scaling: 0 picks it, 1, 2, 4, 8 force 1/scale */
    int64_t max_pixels;     /* 0: 2^28 */
    int32_t flip;           /* not 0: mirrored, left for right */
    int32_t smooth;         /* whether to smooth between blocks where coefficients are unknown */
} pcr_request;

/* One of several pictures of the same stream; of a batch's images, whose n-th has it at n steps
 * after out. */
typedef struct {
    pcr_request request;
    uint8_t *out;
    size_t out_size, step;
} pcr_view;

/* One scan of a script: T.81 B.2.3's Ns, Csj (as component indexes), Ss, Se, Ah, Al. */
typedef struct {
    int32_t num_components;
    int32_t component[4];
    int32_t ss, se, ah, al;
} pcr_scan_spec;

/* How a crop and a flip are drawn: see jpeg/crops.py. */
typedef struct {
    int32_t crop;    /* PCR_CROP_* */
    double scale[2]; /* range of the crop's share of the area */
    double ratio[2]; /* range of its width over its height */
    double flip;     /* probability */
} pcr_draw;

/* A batch of images for the threads of a pool; it and its memory must live until it is done. */
typedef struct pcr_batch pcr_batch;
struct pcr_batch {
    const pcr_piece *pieces; /* num_pieces of each image */
    size_t num_pieces, num_images;
    const pcr_view *views; /* pictures of each image, PCR_MAX_VIEWS at most */
    size_t num_views;
    /* (y, x, height, width, flip) of each view of each image; NULL: as the views say */
    const int32_t *boxes;
    int32_t *codes;  /* what became of each; one that fails does not stop the others */
    size_t taken, done; /* the pool's, as what follows */
    pcr_batch *following;
};

typedef struct pcr_pool pcr_pool;

pcr_decoder *pcr_decoder_new(int backend);
void pcr_decoder_free(pcr_decoder *decoder);
const char *pcr_decoder_backend(const pcr_decoder *decoder);
/* Why the last call on this decoder failed; "" after success. */
const char *pcr_message(const pcr_decoder *decoder);

int pcr_read_header(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
                    pcr_header *header);
/* The height and width that pcr_decode would give; refuses sizes that the bytes cannot hold. */
int pcr_output_size(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
                    const pcr_request *request, int32_t *height, int32_t *width);
int pcr_decode(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
               const pcr_request *request, uint8_t *out, size_t out_size);
/* pcr_decode of each view; the coefficients are decoded once. max_pixels is the first view's. */
int pcr_decode_views(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
                     const pcr_view *views, size_t num_views);
/* The boxes that images draw, (count, num_views, 5) of (y, x, height, width, flip); a whole image
 * is four zeros. state: of a draw's key but for the last part, which is an image's id. sizes:
 * (height, width) of each. */
void pcr_draw_boxes(uint64_t state, const int64_t *ids, const int32_t *sizes, size_t count,
                    const pcr_draw *views, size_t num_views, int32_t *boxes);

/* Threads with a decoder each; without any, pcr_pool_wait decodes. NULL: no memory or no thread. In
 * a forked child a pool is of no use; to stop and to free it does nothing there. */
pcr_pool *pcr_pool_new(int num_threads, int backend);
/* Ends the threads after the images that they decode, once; batches that are not done stay so. */
void pcr_pool_stop(pcr_pool *pool);
/* After pcr_pool_stop, when nobody waits. */
void pcr_pool_free(pcr_pool *pool);
/* Batches are decoded in the order in which they were added. */
void pcr_pool_add(pcr_pool *pool, pcr_batch *batch);
/* Whether the batch is done; waits for it for so long at most, or until the pool is stopped. */
int pcr_pool_wait(pcr_pool *pool, pcr_batch *batch, int milliseconds);

/* Lossless transcode to the scans of a script: progressive, or sequential where the first scan has
 * all coefficients (ss 0, se 63). The result belongs to the decoder, until its next call. */
int pcr_rescan(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
               const pcr_scan_spec *script, size_t num_scans, const uint8_t **out,
               size_t *out_size);

/* The error-bounded quantiser. Codes are 0 for 0, else sign(x) * ceil(|x| / (2 step)), or -128
 * where that does not fit or x is not finite; returns how many are -128. type: PCR_FLOAT32 or
 * PCR_BFLOAT16. step: normal and positive. backend: PCR_BACKEND_*. */
size_t pcr_quantise(const void *values, size_t count, int type, float step, int8_t *codes,
                    int backend);
/* sign(q) * (2 |q| - 1) * step, as float32; -128 is taken as any other code. */
void pcr_dequantise(const int8_t *codes, size_t count, float step, float *values, int backend);
/* table[code] for values of size bytes (2, 4 or 8); codes are unsigned bytes. */
void pcr_look_up(const uint8_t *codes, size_t count, size_t size, const void *table, void *values);
/* Adds to (outer, channels, inner) codes, modulo 256, or takes from them if sign is below 0, what
 * codes of other tensors predict: the sum of tables[channel][source][code] in 32nds of a code,
 * rounded up, from 0 to most. second may be NULL; tables then have one source. */
void pcr_shift_codes(uint8_t *codes, const uint8_t *first, const uint8_t *second,
                     const int16_t *tables, size_t outer, size_t channels, size_t inner, int most,
                     int sign);

/* Changed words between two versions of weights, as gaps and steps. A gap is the number of equal
 * words before a changed one, as bytes of which 255 goes on. A step is how many representable
 * numbers lie between the two words, zigzag: one byte, or 255 and item_bytes bytes.
 * Makes was equal to now; returns how many words differ, or -1 where a buffer is full (was is then
 * equal to now in part). item_bytes: 1, 2 or 4. used: bytes written to gaps and to steps. */
int64_t pcr_sparse_encode(const void *now, void *was, size_t count, int item_bytes, uint8_t *gaps,
                          uint8_t *steps, size_t capacity, size_t *used);
/* Applies the steps. Before a word changes it is copied to old, and done counts it. Returns how
 * many changed, or -1 where the bytes end early, go on too long, or leave the words: then undo. */
int64_t pcr_sparse_apply(void *words, size_t count, int item_bytes, const uint8_t *gaps,
                         size_t gap_bytes, const uint8_t *steps, size_t step_bytes, void *old,
                         uint64_t *done);
/* Copies the first done words of old back; also after the process that applied was killed. */
int64_t pcr_sparse_undo(void *words, size_t count, int item_bytes, const uint8_t *gaps,
                        size_t gap_bytes, const uint8_t *steps, size_t step_bytes, void *old,
                        uint64_t done);

#endif
