/* State and kernels shared by the core's source files. */
#ifndef PCR_INTERNAL_H
#define PCR_INTERNAL_H

#include <stdbool.h>
#include <string.h>

#include "avx2.h"
#include "pcr.h"

#define PCR_LIKELY(x) __builtin_expect(!!(x), 1)
#define PCR_UNLIKELY(x) __builtin_expect(!!(x), 0)

enum {
    PCR_MAX_COMPONENTS = 4,
    PCR_MAX_MCU_BLOCKS = 10, /* T.81 B.2.3 */
    PCR_MAX_SCANS = 256,
    PCR_STANDARD_TABLES_SIZE = 416,
    PCR_VISITS_PER_BIT = 64, /* work cap: block visits per bit of input */
    PCR_FAST_BITS = 11, /* 3 such codes and one of 16 bits fit in 56: see read_ac */
    PCR_SEGMENT_PAD = 256, /* zero bytes after the entropy data: more than a block can take */
    PCR_ROW_PAD = 64,     /* bytes before and after a sample row, for vector loads */
    PCR_SMOOTHED = 10,    /* coefficients that block smoothing looks at, the DC first */
    PCR_SMOOTH_REACH = 2, /* blocks on each side that it looks at */
    PCR_SMOOTH_LARGEST = 2730 /* DC of which 12 add up in 16 bits */
};
#define PCR_DEFAULT_MAX_PIXELS ((int64_t)1 << 28)

/* Memory limit of a decode, coefficients and pixels together: 512 MiB for a stream of up to 1 MiB,
 * and 512 bytes for each further byte. The limits of jpeg/limits.py are the same. */
#define PCR_MEMORY_PER_BYTE ((uint64_t)512)
#define PCR_MEMORY_FLOOR_BYTES ((uint64_t)1 << 20)

/* Larger scratch buffers are freed after a call, so that one huge image does not pin memory. */
#define PCR_KEEP_BYTES ((size_t)64 << 20)

/* An entry of the fast table: value << 16 | (run + 1) << 8 | bits to consume. In a table of a
 * refinement scan the two low bytes are swapped: what the next symbol waits for comes first.
 * PCR_SPECIAL: no value yet; the value field holds the symbol and the low byte the code's length,
 * which is 0 when the code is longer than PCR_FAST_BITS. */
#define PCR_SPECIAL 0x8000u
#define PCR_ENTRY_LOW(e) ((e)&255u)
#define PCR_ENTRY_HIGH(e) (((e) >> 8) & 63u)
#define PCR_ENTRY_VALUE(e) ((int32_t)(e) >> 16)
#define PCR_ENTRY_SYMBOL(e) (((e) >> 16) & 255u)

typedef struct {
    uint32_t fast[1 << PCR_FAST_BITS];
    /* 16-bit left-aligned end of the codes of length l; [17] stops the search */
    uint32_t limit[18];
    int32_t offset[17];  /* symbol index = (code >> (16 - l)) + offset[l] */
    uint8_t counts[17], symbols[256];
    bool present, built, refines;
    int max_size; /* of the coefficients that its symbols announce */
} pcr_huffman;

/* Bit reservoir: the next bit is the top one of `bits`; at least `count` bits are valid. Positions
 * are offsets, not pointers, so that running past the end stays defined; the caller checks. */
typedef struct {
    uint64_t bits;
    uint32_t count;
    const uint8_t *data;
    size_t pos, size;
} pcr_bits;

/* Coefficients of one component. A block has its DC in dc[], its AC coefficients in zigzag order in
 * ac[64 * i ...], and in mask[i] bit 63-k set where coefficient k is not zero. ac[] of a block
 * whose mask is 0 is undefined, so memory that no coefficient needs is neither cleared nor
 * touched. */
typedef struct {
    uint8_t id, h, v, tq;
    int blocks_w, blocks_h; /* that hold samples of the image: T.81 A.1.1 */
    int stride;             /* blocks per row in memory: a whole number of MCUs */
    int rows;               /* block rows in memory; block row y is at y % rows */
    int16_t *dc;
    uint64_t *mask;
    int16_t *ac;
    bool needed, seen, quant_latched;
    bool dc_only;        /* no AC coefficient will be looked at */
    int8_t precision[64]; /* Al of the last scan of each coefficient; -1 before its first */
    uint16_t quant[64];  /* zigzag order */
} pcr_component;

typedef struct {
    int num_components;
    pcr_component *comp[PCR_MAX_COMPONENTS];
    const pcr_huffman *dc[PCR_MAX_COMPONENTS], *ac[PCR_MAX_COMPONENTS];
    int ss, se, ah, al;
    int mcus_w, mcus_h;
    int h[PCR_MAX_COMPONENTS], v[PCR_MAX_COMPONENTS]; /* blocks per MCU; 1x1 when not interleaved */
    int32_t pred[PCR_MAX_COMPONENTS];
    uint32_t eob_run;
    pcr_bits bits;
} pcr_scan;

typedef struct {
    const pcr_piece *pieces;
    size_t num_pieces, index, offset;
    size_t total, consumed;
} pcr_cursor;

typedef struct {
    uint8_t *data;
    size_t capacity;
} pcr_buffer;

typedef int (*pcr_span_fn)(pcr_scan *scan, int row, int col, int count);
/* Transforms `count` blocks of a row into samples; dst is the first block's top left sample. */
typedef void (*pcr_idct_fn)(uint8_t *dst, size_t stride, const int16_t *dc, const uint64_t *mask,
                            const int16_t *ac, const uint16_t *quant, int count);
/* Triangle filter over `count` samples of the nearer and the farther row; below: far is under
 * near. */
typedef void (*pcr_upsample_fn)(uint8_t *dst, const uint8_t *near, const uint8_t *far, int count,
                                int below);
/* Rows in, pixels out; dst[0] alone for interleaved output. */
typedef void (*pcr_color_fn)(uint8_t *const *dst, const uint8_t *const *src, int count);

/* Block smoothing of one component: what is estimated, and memory for a row of blocks. */
typedef struct {
    bool on;
    bool blend; /* no AC coefficient is known: the DC changes, too */
    bool known; /* some are, and replace the estimates */
    bool wide;  /* some are above the first 16 */
    bool exact; /* values are too large for 32 bits */
    uint16_t quant[PCR_SMOOTHED];
    int32_t limit[PCR_SMOOTHED]; /* of an estimate: what the bits known would show otherwise */
    float slope[PCR_SMOOTHED], offset[PCR_SMOOTHED]; /* the estimate of a sum */
    int16_t *rows[5], *dc, *ac;
    uint64_t *mask;
} pcr_smoothing;

/* Estimates the coefficients of a row of blocks; smooth.h has the parameters. */
typedef void (*pcr_smooth_fn)(const pcr_smoothing *how, int count, const uint64_t *mask,
                              const int16_t *ac);

typedef struct pcr_filter pcr_filter;
typedef struct pcr_tokens pcr_tokens;

enum { PCR_UP_NONE, PCR_UP_H2V1, PCR_UP_H2V2, PCR_UP_H1V2, PCR_UP_REPLICATE };

/* Samples of one component on their way from coefficients to pixels: a ring of block rows. */
typedef struct {
    int size;          /* samples per block side: 8, 4, 2 or 1 */
    int up_h, up_v;    /* output pixels per sample */
    int kind;          /* PCR_UP_* */
    int width, height; /* samples of the image */
    int block_x0, block_x1;
    int ring_blocks;
    int next_block; /* row of blocks to transform next */
    size_t stride;
    uint8_t *data, *upsampled;
    pcr_smoothing smoothing;
} pcr_plane;

/* What a request means for this frame; pixel ranges are half-open, in the DCT-scaled image. */
typedef struct {
    pcr_request request; /* as stored: its crop and size before the pixels are turned */
    bool transposed, rows_back, columns_back; /* how pixels are put: rows as columns, last first */
    int scale; /* 1, 2, 4 or 8 */
    int channels, out_h, out_w;
    int y0, y1, x0, x1;
    double box_y0, box_y1, box_x0, box_x1; /* of the resize */
    pcr_plane planes[PCR_MAX_COMPONENTS];
    uint8_t *temp[3];
    uint8_t *band; /* the last rows, before they are put as columns */
} pcr_plan_state;

typedef struct {
    const char *name;
    /* Copies bytes up to the first 0xFF or the end; dst must have 32 bytes of room beyond. */
    size_t (*copy_plain)(uint8_t *dst, const uint8_t *src, size_t size);
    pcr_span_fn dc_first, dc_refine, ac_first, ac_refine, sequential;
    /* The symbols of one scan to be encoded, and how often each occurs. */
    void (*tokenize)(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens);
    pcr_smooth_fn smooth;
    pcr_idct_fn idct8, idct4, idct2, idct1;
    pcr_upsample_fn up_h2v1, up_h2v2, up_h1v2;
    pcr_color_fn ycc_rgb_hwc, ycc_rgb_chw, interleave3;
    void (*resize_row)(uint8_t *dst, const uint8_t *src, const pcr_filter *filter);
    void (*resize_column)(uint8_t *dst, const uint8_t *src, size_t stride, const int16_t *weights,
                          int taps, int count);
} pcr_kernels;

struct pcr_decoder {
    const pcr_kernels *kernels;
    char message[256];
    pcr_cursor cursor;
    int width, height, num_components, h_max, v_max;
    int mcus_w, mcus_h;
    bool progressive, have_frame, saw_tables, saw_jfif, saw_adobe;
    int adobe_transform, color, orientation, xmp_orientation;
    size_t exif_size; /* bytes of EXIF before the first scan */
    uint8_t jfif[7]; /* version, density unit, densities */
    int restart_interval, num_scans;
    uint64_t visits;
    int64_t max_pixels;
    uint64_t output_bytes; /* of the pixels asked for; 0 when none are */
    uint16_t quant[4][64];
    bool quant_present[4];
    pcr_huffman huffman[2][4]; /* [class][slot] */
    pcr_component comp[PCR_MAX_COMPONENTS];
    pcr_scan scan;
    int pending_marker; /* met at the end of entropy data; 0 when none */
    int next_restart;   /* RSTn expected next */
    uint32_t mcus_to_restart;
    int rows_needed; /* MCU rows of the frame whose coefficients will be looked at */
    bool want_all;   /* rescan: keep every coefficient */
    bool keep_rows;  /* several views: rows are looked at more than once */
    bool one_scan;   /* sequential, all components: what follows is not looked at */
    bool streaming;  /* such a scan, whose coefficients live for two MCU rows */
    int rows_decoded;
    pcr_plan_state plan;
    pcr_buffer coefficients, segment, payload, exif, filters, rows, output;
};

/* errors.c: writes the message that pcr_message() gives, and returns the code */
int pcr_fail(pcr_decoder *dec, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* decoder.c: how every public call ends, whatever its code, which it returns */
int pcr_finish(pcr_decoder *dec, int code);
/* pcr_trim, but for dec->output, which holds rescan's result */
void pcr_trim_but_output(pcr_decoder *dec);
/* Reads up to the first scan; then the views of the stream may be decoded, once. */
int pcr_open(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces, int64_t max_pixels);
int pcr_decode_opened(pcr_decoder *dec, const pcr_view *views, size_t num_views);

/* cursor.c */
int pcr_reserve(pcr_decoder *dec, pcr_buffer *buffer, size_t size);
void pcr_cursor_init(pcr_cursor *cursor, const pcr_piece *pieces, size_t num_pieces);
int pcr_cursor_byte(pcr_cursor *cursor); /* -1 at the end */
/* NULL: the stream ends before, or no memory */
const uint8_t *pcr_cursor_take(pcr_decoder *dec, size_t size);
int pcr_next_segment(pcr_decoder *dec);

/* huffman.c */
extern const uint8_t pcr_standard_tables[PCR_STANDARD_TABLES_SIZE];
int pcr_huffman_build(pcr_decoder *dec, pcr_huffman *table, bool is_dc, bool refines);

/* markers.c */
int pcr_parse_to_scan(pcr_decoder *dec, bool *found);
void pcr_start_stream(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces);
int pcr_parse_frame(pcr_decoder *dec);

/* scan.c */
int pcr_read_scans(pcr_decoder *dec);
int pcr_ensure_rows(pcr_decoder *dec, int mcu_row);
int pcr_check_payable(pcr_decoder *dec);
int pcr_check_memory(pcr_decoder *dec, uint64_t bytes);

/* plan.c: needs the frame; pcr_plan_scans also the markers before the first scan */
int pcr_plan_geometry(pcr_decoder *dec, const pcr_request *request);
void pcr_plan_color(pcr_decoder *dec);
/* The picture's height and width after its orientation is undone; PCR_USAGE: there is none such. */
int pcr_turned_size(pcr_decoder *dec, int orientation, int32_t *height, int32_t *width);

/* output.c */
int pcr_output(pcr_decoder *dec, uint8_t *out);

extern const pcr_kernels pcr_kernels_portable;
#if PCR_HAVE_VECTORS
extern const pcr_kernels pcr_kernels_vector;
#endif

static inline int pcr_min(int a, int b) { return a < b ? a : b; }
static inline int pcr_max(int a, int b) { return a > b ? a : b; }
static inline int pcr_ceil_div(int a, int b) { return (a + b - 1) / b; }

#endif
