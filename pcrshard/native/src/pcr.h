/* pcrshard's native core: progressive and baseline JPEG to pixels, and lossless rescan.
 *
 * What callers include, and numbers.h for numbers. No globals: all state lives in a decoder, which
 * one thread at a time may use. Every function that can fail returns a PCR_* code; pcr_message()
 * explains it.
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
    PCR_COLOR_GRAY = 0,
    PCR_COLOR_YCC = 1,
    PCR_COLOR_RGB = 2,
    PCR_COLOR_CMYK = 3,
    PCR_COLOR_YCCK = 4
};
enum { PCR_OUT_RGB = 0, PCR_OUT_GRAY = 1 };
enum { PCR_LAYOUT_HWC = 0, PCR_LAYOUT_CHW = 1 };

enum { PCR_MAX_VIEWS = 64, PCR_MAX_THREADS = 4096 };
enum { PCR_LOSS_SCALES = 9, PCR_LOSS_AT_ONCE = 4 };

enum { PCR_CROP_NONE = 0, PCR_CROP_CENTER = 1, PCR_CROP_RANDOM = 2 };

typedef struct pcr_decoder pcr_decoder;

/* A contiguous part of a JPEG; a stream is an array of them, in order. */
typedef struct {
    const uint8_t *data;
    size_t size;
} pcr_piece;

/* What to decode, in pixels of the picture after its orientation is undone. crop_h == 0: the whole
 * image; out_h == 0: no resize. */
typedef struct {
    int32_t crop_y, crop_x, crop_h, crop_w;
    int32_t out_h, out_w;
    int32_t layout, color; /* PCR_LAYOUT_*, PCR_OUT_* */
    int32_t scale;         /* DCT scaling: 0 picks it, 1, 2, 4, 8 force 1/scale */
    int64_t max_pixels;    /* 0: 2^28 */
    int32_t orientation;   /* EXIF orientation to undo, 1: none; 0: as the stream says */
    int32_t flip;          /* not 0: flipped horizontally */
    int32_t smooth;        /* not 0: smooth between blocks where coefficients are unknown */
} pcr_request;

/* One of several pictures of a stream. In a batch, that of image n begins n * step bytes after
 * out. */
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

/* How a crop and a flip are drawn. PCR_CROP_CENTER is the middle square of 0.875 of the shorter
 * side; PCR_CROP_RANDOM is RandomResizedCrop (Szegedy et al. 2015), ten tries, then the largest
 * middle part of a shape in the range. */
typedef struct {
    int32_t crop;    /* PCR_CROP_* */
    double scale[2]; /* range of the crop's fraction of the area */
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
    const int32_t *order;        /* images in the order to begin them; NULL: by number */
    const uint8_t *orientations; /* of each image, as in a request; NULL: as the views say */
    /* (y, x, height, width, flip) of each view of each image; NULL: as the views say. With draws
     * they are an output: image i draws from states[i], in the order of the views. */
    int32_t *boxes;
    const pcr_draw *draws;
    const uint64_t *states;
    int32_t *sizes; /* output: (height, width) of each image whose header was read; or NULL */
    int32_t *codes; /* output: PCR_* of each image; one that fails does not stop the others */
    size_t taken, done; /* this and the next are for the pool */
    pcr_batch *following;
};

typedef struct pcr_pool pcr_pool;

pcr_decoder *pcr_decoder_new(int backend);
void pcr_decoder_free(pcr_decoder *decoder);
const char *pcr_decoder_backend(const pcr_decoder *decoder);
/* Why the last call on this decoder failed; "" after success. */
const char *pcr_message(const pcr_decoder *decoder);
/* Frees large scratch memory, as every call does when it ends, and the result of pcr_rescan if it
 * is large. */
void pcr_trim(pcr_decoder *decoder);

/* The height and width that pcr_decode would give; refuses sizes that the bytes cannot hold. */
int pcr_output_size(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
                    const pcr_request *request, int32_t *height, int32_t *width);
int pcr_decode(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
               const pcr_request *request, uint8_t *out, size_t out_size);
/* pcr_decode of each view; the coefficients are decoded once. max_pixels is the first view's. */
int pcr_decode_views(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
                     const pcr_view *views, size_t num_views);
/* The end of the entropy data that begins at `start`: the marker after it, or the fill bytes before
 * that marker; `size` if there is no marker. */
size_t pcr_scan_end(const uint8_t *data, size_t size, size_t start);
/* Orientation, 1 to 8, in EXIF, with or without its header; 0 if what is there is none of these, -1
 * if there is none. */
int pcr_exif_orientation(const uint8_t *exif, size_t size);
/* The same for XMP, in the payload of an APP1 segment; -1 if the payload is no XMP, 0 if it has no
 * orientation. It counts where EXIF gives -1. */
int pcr_xmp_orientation(const uint8_t *payload, size_t size);

/* The random state of a key: from the state of the key without its last part, and that part. The
 * state of a key without parts is 0. */
uint64_t pcr_draw_state(uint64_t state, uint64_t part);
/* The boxes of one image, (num_views, 5) of (y, x, height, width, flip); a whole image is four
 * zeros. */
void pcr_draw_boxes(uint64_t state, int32_t height, int32_t width, const pcr_draw *draws,
                    size_t num_views, int32_t *boxes);

/* At most PCR_MAX_THREADS threads with a decoder each; without any, pcr_pool_wait decodes, in one
 * of the threads that wait. NULL: too many, no memory or no thread. A forked child cannot use the
 * pool; stopping and freeing it do nothing there. */
pcr_pool *pcr_pool_new(int num_threads, int backend);
/* Ends the threads after their current images; unfinished batches stay unfinished. */
void pcr_pool_stop(pcr_pool *pool);
/* After pcr_pool_stop, once no thread waits. */
void pcr_pool_free(pcr_pool *pool);
/* Batches are decoded in the order in which they were added. PCR_USAGE: a batch that cannot be
 * decoded safely, which is not added. */
int pcr_pool_add(pcr_pool *pool, pcr_batch *batch);
/* Waits until the batch is done, the time is over or the pool is stopped; returns whether it is
 * done. */
int pcr_pool_wait(pcr_pool *pool, pcr_batch *batch, int milliseconds);

/* Where a scan of a transcoded file is: the offsets of its first byte, which is that of its tables,
 * and of its entropy-coded data; and the loss of the image where it ends after this scan. */
typedef struct {
    size_t start, data;
    double loss;
} pcr_scan_place;

/* What an image's loss consists of: weights of the squared errors of its components, and of the
 * scales: as it is, halved once, and so on; PCR_LOSS_AT_ONCE of these at most are not 0. */
typedef struct {
    double components[4], scales[9];
} pcr_loss_weights;

/* Lossless transcode to the scans of a script: progressive, or sequential where the first scan has
 * all coefficients (ss 0, se 63). Fills the place of each scan, and, with weights, the loss
 * of an image that ends after it. The result belongs to the decoder, until its next call. */
int pcr_rescan(pcr_decoder *decoder, const pcr_piece *pieces, size_t num_pieces,
               const pcr_scan_spec *script, size_t num_scans, const pcr_loss_weights *weights,
               pcr_scan_place *places, const uint8_t **out, size_t *out_size);

/* CRC-32C (Castagnoli); crc is that of the preceding bytes, 0 at the beginning. */
uint32_t pcr_crc32c(uint32_t crc, const uint8_t *data, size_t size);
/* Where the pieces of units are. A row has a piece of every unit, one after the other from the
 * row's start on; the first `base` rows of a unit are contiguous instead, at the unit's offset. */
typedef struct {
    size_t rows, units, base;
    const uint64_t *starts;  /* of each row */
    const uint64_t *offsets; /* of each unit; NULL if base is 0 */
    const uint8_t *headers;  /* of all pieces, in order; not in the buffer */
    size_t headers_size;
    const uint8_t *buffer;
    size_t buffer_size;
} pcr_place;

/* Fills pieces, (units, 2 rows): the header and the own bytes of each piece. sizes and header_sizes
 * are (rows, units); a size counts the header. 0 if a piece is not in the buffer. */
int pcr_place_pieces(const pcr_place *place, const uint32_t *sizes, const uint16_t *header_sizes,
                     pcr_piece *pieces);
/* For each of count streams of num_pieces pieces, sets damaged to 1 if its CRC-32C differs, else to
 * 0. A stream without bytes is never damaged. Returns how many are. */
size_t pcr_check_pieces(const pcr_piece *pieces, size_t num_pieces, size_t count,
                        const uint32_t *crcs, uint8_t *damaged);
/* Copies the pieces, one after the other, to out, which has room for all of them. */
void pcr_join_pieces(const pcr_piece *pieces, size_t num_pieces, uint8_t *out);
/* Adds to a number atomically, across threads and processes. */
void pcr_atomic_add(int64_t *number, int64_t amount);
/* Sets a number atomically, across threads and processes, if it is the expected one, and returns
 * whether it was. */
int pcr_compare_exchange(int64_t *number, int64_t expected, int64_t desired);

#endif
