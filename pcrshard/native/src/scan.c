/* Drives the entropy decoding of scans: memory, tables, restarts, and the caps on work. */
#include "bits.h"

static size_t align(size_t n) { return (n + 63) / 64 * 64; }

/* Every block costs at least one bit of its DC scan, so a header cannot claim more blocks of a
 * component than the stream has bits. Checked before memory for them is taken. */
int pcr_check_payable(pcr_decoder *dec) {
    uint64_t most = 0;
    for (int c = 0; c < dec->num_components; c++) {
        uint64_t blocks = (uint64_t)dec->comp[c].blocks_w * (uint64_t)dec->comp[c].blocks_h;
        if (blocks > most) most = blocks;
    }
    if (most > 8 * (uint64_t)dec->cursor.total)
        return pcr_fail(dec, PCR_LIMIT,
                        "expected at least 1 bit per block of %dx%d pixels, got %zu bytes",
                        dec->width, dec->height, dec->cursor.total);
    return PCR_OK;
}

/* A few bytes may claim gigabytes. Checked before memory is taken. */
int pcr_check_memory(pcr_decoder *dec, uint64_t bytes) {
    uint64_t given = dec->cursor.total;
    if (given < PCR_MEMORY_FLOOR_BYTES) given = PCR_MEMORY_FLOOR_BYTES;
    if (bytes / PCR_MEMORY_PER_BYTE > given)
        return pcr_fail(dec, PCR_LIMIT,
                        "expected to need at most %llu bytes of memory for %zu bytes of JPEG, "
                        "got %dx%d pixels, which need %llu",
                        (unsigned long long)(given * PCR_MEMORY_PER_BYTE), dec->cursor.total,
                        dec->width, dec->height, (unsigned long long)bytes);
    return PCR_OK;
}

/* Coefficients of all components in one piece of memory; see pcr_component for what is cleared. */
static int allocate(pcr_decoder *dec) {
    size_t size = 0, blocks[PCR_MAX_COMPONENTS];
    int code = pcr_check_payable(dec);
    if (code) return code;
    for (int c = 0; c < dec->num_components; c++) {
        pcr_component *comp = &dec->comp[c];
        comp->stride = dec->mcus_w * comp->h;
        comp->rows = (dec->streaming ? pcr_min(2, dec->mcus_h) : dec->mcus_h) * comp->v;
        blocks[c] = (size_t)comp->stride * (size_t)comp->rows;
        size += align(128 * blocks[c]) + align(8 * blocks[c]) + align(2 * blocks[c]);
    }
    code = pcr_check_memory(dec, size + dec->output_bytes);
    if (!code) code = pcr_reserve(dec, &dec->coefficients, size);
    if (code) return code;
    uint8_t *at = dec->coefficients.data;
    for (int c = 0; c < dec->num_components; c++) {
        pcr_component *comp = &dec->comp[c];
        comp->ac = (int16_t *)at;
        at += align(128 * blocks[c]);
        comp->mask = (uint64_t *)at;
        memset(at, 0, 8 * blocks[c]);
        at += align(8 * blocks[c]);
        comp->dc = (int16_t *)at;
        memset(at, 0, 2 * blocks[c]);
        at += align(2 * blocks[c]);
    }
    return PCR_OK;
}

static int use_table(pcr_decoder *dec, const pcr_huffman *table, bool is_dc) {
    if (!table->present)
        return pcr_fail(dec, PCR_UNSUPPORTED,
                        "expected a DHT segment for each %s table used, got none",
                        is_dc ? "DC" : "AC");
    return pcr_huffman_build(dec, (pcr_huffman *)table, is_dc, dec->scan.ah > 0);
}

/* The quantization table of a component is the one in force at its first scan (jdinput.c). */
static int prepare_components(pcr_decoder *dec) {
    pcr_scan *scan = &dec->scan;
    bool dc = scan->ss == 0 && scan->ah == 0, ac = scan->se > 0;
    for (int i = 0; i < scan->num_components; i++) {
        pcr_component *comp = scan->comp[i];
        int code = dc ? use_table(dec, scan->dc[i], true) : PCR_OK;
        if (!code && ac) code = use_table(dec, scan->ac[i], false);
        if (code) return code;
        if (comp->quant_latched) continue;
        if (!dec->quant_present[comp->tq])
            return pcr_fail(dec, PCR_CORRUPT,
                            "expected quantization table %d before the scan, got none", comp->tq);
        memcpy(comp->quant, dec->quant[comp->tq], sizeof comp->quant);
        comp->quant_latched = true;
    }
    return PCR_OK;
}

/* A progressive bomb is many cheap scans over many blocks: work is bounded by the bytes given. */
static int charge(pcr_decoder *dec) {
    const pcr_scan *scan = &dec->scan;
    uint64_t blocks = 0, bits = 8 * (uint64_t)dec->cursor.total;
    for (int i = 0; i < scan->num_components; i++) blocks += (uint64_t)(scan->h[i] * scan->v[i]);
    blocks *= (uint64_t)scan->mcus_w * (uint64_t)scan->mcus_h;
    dec->visits += blocks;
    if (scan->ss == 0 && blocks > bits)
        return pcr_fail(dec, PCR_LIMIT,
                        "expected at least 1 bit per block, "
                        "got %zu bytes for a scan of %llu blocks",
                        dec->cursor.total, (unsigned long long)blocks);
    if (dec->visits > PCR_VISITS_PER_BIT * bits + (1 << 16))
        return pcr_fail(dec, PCR_LIMIT,
                        "expected at most %d block visits per bit, "
                        "got scan %d of a %zu byte stream",
                        PCR_VISITS_PER_BIT, dec->num_scans, dec->cursor.total);
    return PCR_OK;
}

static bool scan_needed(const pcr_decoder *dec) {
    const pcr_scan *scan = &dec->scan;
    for (int i = 0; i < scan->num_components; i++)
        if (scan->comp[i]->needed && !(scan->ss > 0 && scan->comp[i]->dc_only)) return true;
    return false;
}

static pcr_span_fn choose_span(const pcr_decoder *dec) {
    const pcr_scan *scan = &dec->scan;
    const pcr_kernels *kernels = dec->kernels;
    if (!dec->progressive) return kernels->sequential;
    if (scan->ss == 0) return scan->ah ? kernels->dc_refine : kernels->dc_first;
    return scan->ah ? kernels->ac_refine : kernels->ac_first;
}

/* Bytes after the last MCU are damage that a transcoded file would hide; libjpeg warns of them. A
 * decoder need not care. Up to three are padding to whole words, which some encoders write. */
static int check_left(pcr_decoder *dec) {
    const pcr_bits *b = &dec->scan.bits;
    uint64_t used = (b->pos * 8 - b->count + 7) / 8;
    if (!dec->want_all || used + 3 >= b->size) return PCR_OK;
    return pcr_fail(dec, PCR_CORRUPT, "expected the end of scan %d, got %llu extraneous bytes",
                    dec->num_scans, (unsigned long long)(b->size - used));
}

/* T.81 F.2.1.3.1: a restart interval starts with fresh predictions, after RSTm in turn. */
static int restart(pcr_decoder *dec) {
    int expected = 0xD0 + dec->next_restart;
    int code = check_left(dec);
    if (code) return code;
    if (dec->pending_marker != expected)
        return pcr_fail(dec, PCR_CORRUPT, "expected restart marker 0x%02X, got marker 0x%02X",
                        expected, dec->pending_marker);
    dec->next_restart = (dec->next_restart + 1) & 7;
    dec->mcus_to_restart = (uint32_t)dec->restart_interval;
    dec->scan.eob_run = 0;
    memset(dec->scan.pred, 0, sizeof dec->scan.pred);
    return pcr_next_segment(dec);
}

/* MCU rows first..stop-1 of the scan. */
static int decode_rows(pcr_decoder *dec, int first, int stop) {
    pcr_scan *scan = &dec->scan;
    const pcr_span_fn span = choose_span(dec);
    for (int row = first; row < stop; row++) {
        for (int col = 0, count; col < scan->mcus_w; col += count) {
            count = scan->mcus_w - col;
            if (dec->restart_interval) {
                int code = dec->mcus_to_restart ? PCR_OK : restart(dec);
                if (code) return code;
                count = pcr_min(count, (int)dec->mcus_to_restart);
                dec->mcus_to_restart -= (uint32_t)count;
            }
            if (span(scan, row, col, count))
                return pcr_fail(dec, PCR_CORRUPT,
                                "expected Huffman codes of scan %d, got none that fits in MCU row "
                                "%d", dec->num_scans, row);
            if (pcr_overrun(&scan->bits))
                return pcr_fail(dec, PCR_CORRUPT,
                                "expected %d MCU rows in scan %d, got data for %d", scan->mcus_h,
                                dec->num_scans, row);
        }
    }
    return PCR_OK;
}

/* Rows of the scan that lie in the first `mcu_rows` MCU rows of the frame. */
static int scan_rows(const pcr_scan *scan, int mcu_rows) {
    int unit = scan->num_components == 1 ? scan->comp[0]->v : 1;
    return pcr_min(mcu_rows * unit, scan->mcus_h);
}

static int skip_entropy_data(pcr_decoder *dec) {
    int code = PCR_OK;
    while (!code && dec->pending_marker >= 0xD0 && dec->pending_marker <= 0xD7)
        code = pcr_next_segment(dec);
    return code;
}

static int read_scan(pcr_decoder *dec) {
    int code = charge(dec);
    if (!code && dec->num_scans == 1) {
        dec->one_scan = !dec->progressive && !dec->want_all &&
            dec->scan.num_components == dec->num_components;
        dec->streaming = dec->one_scan && !dec->keep_rows;
        code = allocate(dec);
    }
    if (!code) code = prepare_components(dec);
    if (!code) code = pcr_next_segment(dec);
    if (code || dec->streaming) return code;
    dec->next_restart = 0;
    dec->mcus_to_restart = (uint32_t)dec->restart_interval;
    if (scan_needed(dec)) code = decode_rows(dec, 0, scan_rows(&dec->scan, dec->rows_needed));
    if (code || dec->one_scan) return code;
    code = check_left(dec);
    return code ? code : skip_entropy_data(dec);
}

/* All scans from the one whose header was just read; a streamed one stays to be decoded by rows. */
int pcr_read_scans(pcr_decoder *dec) {
    for (bool found = true; found;) {
        int code = read_scan(dec);
        if (code || dec->one_scan) return code;
        code = pcr_parse_to_scan(dec, &found);
        if (code) return code;
    }
    return PCR_OK;
}

/* Makes the coefficients of one MCU row of the frame available. */
int pcr_ensure_rows(pcr_decoder *dec, int mcu_row) {
    int stop = scan_rows(&dec->scan, mcu_row + 1), first = dec->rows_decoded;
    if (!dec->streaming || stop <= first) return PCR_OK;
    if (first == 0) {
        dec->next_restart = 0;
        dec->mcus_to_restart = (uint32_t)dec->restart_interval;
    }
    dec->rows_decoded = stop;
    return decode_rows(dec, first, stop);
}
