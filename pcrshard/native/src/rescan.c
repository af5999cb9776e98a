/* Lossless transcoding to progressive with any scan script, or to sequential; the markers are those
 * of jpegtran -copy none. */
#include <stdlib.h>

#include "encode.h"
#include "loss.h"

static int bad_script(pcr_decoder *dec, size_t index, const char *expected) {
    return pcr_fail(dec, PCR_USAGE, "expected %s, got otherwise in scan %zu of the script",
                    expected, index + 1);
}

static int check_components(pcr_decoder *dec, const pcr_scan_spec *spec, size_t index) {
    int blocks = 0;
    if (spec->num_components < 1 || spec->num_components > dec->num_components)
        return bad_script(dec, index, "1 to as many components as the image has");
    for (int i = 0; i < spec->num_components; i++) {
        int c = spec->component[i];
        if (c < 0 || c >= dec->num_components || (i && c <= spec->component[i - 1]))
            return bad_script(dec, index, "component indexes of the image, ascending");
        blocks += dec->comp[c].h * dec->comp[c].v;
    }
    if (spec->num_components > 1 && blocks > PCR_MAX_MCU_BLOCKS)
        return bad_script(dec, index, "at most 10 blocks in an MCU");
    return PCR_OK;
}

/* A scan of all coefficients is a sequential one, and so are all others then. */
static bool is_sequential(const pcr_scan_spec *script, size_t num_scans) {
    return num_scans && script[0].ss == 0 && script[0].se == 63;
}

/* One scan against what came before it (T.81 G.1.1.1); precision[] as in pcr_component. */
static int check_spec(pcr_decoder *dec, const pcr_scan_spec *spec, size_t index, bool sequential,
                      int8_t precision[4][64]) {
    int code = check_components(dec, spec, index);
    if (code) return code;
    if (spec->ss < 0 || spec->se > 63 || spec->ss > spec->se || spec->al < 0 || spec->al > 13)
        return bad_script(dec, index, "0 <= Ss <= Se <= 63 and 0 <= Al <= 13");
    if (spec->ss == 0 ? spec->se != 0 && !sequential : spec->num_components != 1)
        return bad_script(dec, index, "DC alone, or AC of one component");
    if (sequential && (spec->ss || spec->se != 63))
        return bad_script(dec, index, "all coefficients, as in the first scan");
    for (int i = 0; i < spec->num_components; i++) {
        int8_t *seen = precision[spec->component[i]];
        if (spec->ss && seen[0] < 0) return bad_script(dec, index, "DC before AC");
        for (int k = spec->ss; k <= spec->se; k++) {
            bool follows = seen[k] < 0
                               ? spec->ah == 0
                               : seen[k] > 0 && spec->ah == seen[k] && spec->al == seen[k] - 1;
            if (!follows)
                return bad_script(dec, index, "each bit of a coefficient once, the highest first");
            seen[k] = (int8_t)spec->al;
        }
    }
    return PCR_OK;
}

static int check_script(pcr_decoder *dec, const pcr_scan_spec *script, size_t num_scans) {
    int8_t precision[4][64];
    memset(precision, -1, sizeof precision);
    if (num_scans > PCR_MAX_SCANS)
        return pcr_fail(dec, PCR_USAGE, "expected at most %d scans, got %zu", PCR_MAX_SCANS,
                        num_scans);
    for (size_t i = 0; i < num_scans; i++) {
        int code = check_spec(dec, &script[i], i, is_sequential(script, num_scans), precision);
        if (code) return code;
    }
    for (int c = 0; c < dec->num_components; c++)
        for (int k = 0; k < 64; k++)
            if (precision[c][k])
                return pcr_fail(dec, PCR_USAGE,
                                "expected a script that sends everything, "
                                "got none of the last bit of coefficient %d of component %d", k, c);
    return PCR_OK;
}

/* That the frame header to be written can say what was read. */
static int check_source(pcr_decoder *dec) {
    for (int c = 0; c < dec->num_components; c++) {
        const pcr_component *comp = &dec->comp[c];
        if (!comp->quant_latched)
            return pcr_fail(dec, PCR_CORRUPT, "expected a scan of every component, got none of %d",
                            comp->id);
        for (int other = 0; other < c; other++)
            if (dec->comp[other].tq == comp->tq &&
                memcmp(dec->comp[other].quant, comp->quant, sizeof comp->quant))
                return pcr_fail(dec, PCR_UNSUPPORTED, "expected one quantization table %d, got two",
                                comp->tq);
    }
    return PCR_OK;
}

static void put_bytes(pcr_writer *writer, const void *bytes, size_t size) {
    if (!pcr_writer_reserve(writer, size)) return;
    memcpy(writer->data + writer->size, bytes, size);
    writer->size += size;
}

static void put_byte(pcr_writer *writer, int byte) {
    uint8_t b = (uint8_t)byte;
    put_bytes(writer, &b, 1);
}

static void put_word(pcr_writer *writer, int word) {
    put_byte(writer, word >> 8);
    put_byte(writer, word);
}

static void put_marker(pcr_writer *writer, int marker, int size) {
    put_byte(writer, 0xFF);
    put_byte(writer, marker);
    if (size) put_word(writer, size);
}

/* JFIF for gray and YCbCr, Adobe for the others: what libjpeg writes for these color spaces. */
static void put_color_markers(const pcr_decoder *dec, pcr_writer *writer) {
    static const uint8_t adobe[11] = {'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0};
    static const uint8_t jfif[7] = {1, 1, 0, 0, 1, 0, 1};
    if (dec->color == PCR_COLOR_GRAY || dec->color == PCR_COLOR_YCC) {
        put_marker(writer, 0xE0, 16);
        put_bytes(writer, "JFIF", 5);
        put_bytes(writer, dec->saw_jfif && dec->jfif[0] == 1 ? dec->jfif : jfif, 2);
        put_bytes(writer, dec->saw_jfif ? dec->jfif + 2 : jfif + 2, 5);
        put_word(writer, 0);
        return;
    }
    put_marker(writer, 0xEE, 14);
    put_bytes(writer, adobe, sizeof adobe);
    put_byte(writer, dec->color == PCR_COLOR_YCCK ? 2 : 0);
}

static void put_frame(const pcr_decoder *dec, pcr_writer *writer, bool sequential) {
    unsigned written = 0;
    bool baseline = sequential; /* T.81 table B.4: 8 bits for each step of the quantizer */
    for (int c = 0; c < dec->num_components; c++) {
        const pcr_component *comp = &dec->comp[c];
        bool wide = false;
        if (written >> comp->tq & 1) continue;
        written |= 1u << comp->tq;
        for (int k = 0; k < 64; k++) wide |= comp->quant[k] > 255;
        baseline &= !wide;
        put_marker(writer, 0xDB, wide ? 131 : 67);
        put_byte(writer, wide << 4 | comp->tq);
        for (int k = 0; k < 64; k++) {
            if (wide) put_byte(writer, comp->quant[k] >> 8);
            put_byte(writer, comp->quant[k]);
        }
    }
    put_marker(writer, baseline ? 0xC0 : sequential ? 0xC1 : 0xC2, 8 + 3 * dec->num_components);
    put_byte(writer, 8);
    put_word(writer, dec->height);
    put_word(writer, dec->width);
    put_byte(writer, dec->num_components);
    for (int c = 0; c < dec->num_components; c++) {
        put_byte(writer, dec->comp[c].id);
        put_byte(writer, dec->comp[c].h << 4 | dec->comp[c].v);
        put_byte(writer, dec->comp[c].tq);
    }
}

static void put_huffman(pcr_writer *writer, const pcr_encoder_table *table, int class, int slot) {
    put_marker(writer, 0xC4, 19 + table->num_symbols);
    put_byte(writer, class << 4 | slot);
    put_bytes(writer, table->counts + 1, 16);
    put_bytes(writer, table->symbols, (size_t)table->num_symbols);
}

static void put_scan_header(const pcr_decoder *dec, pcr_writer *writer, const pcr_scan_spec *spec) {
    put_marker(writer, 0xDA, 6 + 2 * spec->num_components);
    put_byte(writer, spec->num_components);
    for (int i = 0; i < spec->num_components; i++) {
        int table = pcr_table_of(dec, spec->component[i]);
        put_byte(writer, dec->comp[spec->component[i]].id);
        int dc = spec->ss || spec->ah ? 0 : table, ac = spec->se ? table : 0;
        put_byte(writer, dc << 4 | ac);
    }
    put_byte(writer, spec->ss);
    put_byte(writer, spec->se);
    put_byte(writer, spec->ah << 4 | spec->al);
}

static void encode_scan(pcr_decoder *dec, pcr_writer *writer, const pcr_scan_spec *spec,
                        pcr_tokens *tokens, pcr_scan_place *place) {
    place->start = writer->size;
    pcr_encoder_table tables[PCR_NUM_TABLES] = {0};
    unsigned written = 0;
    dec->kernels->tokenize(dec, spec, tokens);
    for (int i = 0; i < spec->num_components && !(spec->ss == 0 && spec->ah); i++) {
        int slot = pcr_table_of(dec, spec->component[i]);
        if (written >> slot & 1) continue;
        written |= 1u << slot;
        for (int class = spec->ss > 0; class <= (spec->se > 0); class++) {
            int table = 2 * class + slot;
            pcr_optimal_table(&tables[table], tokens->frequency[table]);
            put_huffman(writer, &tables[table], class, slot);
        }
    }
    put_scan_header(dec, writer, spec);
    place->data = writer->size;
    pcr_write_tokens(writer, tokens, tables);
}

static int read_coefficients(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces) {
    bool found = false;
    pcr_start_stream(dec, pieces, num_pieces);
    dec->want_all = true;
    int code = pcr_parse_frame(dec);
    if (!code) code = pcr_parse_to_scan(dec, &found);
    if (!code && !found) code = pcr_fail(dec, PCR_CORRUPT, "expected at least one scan, got none");
    if (code) return code;
    dec->rows_needed = dec->mcus_h;
    code = pcr_read_scans(dec);
    return code ? code : check_source(dec);
}

static int transcode(pcr_decoder *dec, const pcr_scan_spec *script, size_t num_scans,
                     pcr_loss *loss, pcr_scan_place *places, const uint8_t **out,
                     size_t *out_size) {
    pcr_tokens tokens = {0};
    pcr_writer writer = {.data = dec->output.data, .capacity = dec->output.capacity};
    put_marker(&writer, 0xD8, 0);
    put_color_markers(dec, &writer);
    put_frame(dec, &writer, is_sequential(script, num_scans));
    for (size_t i = 0; i < num_scans && !tokens.failed; i++) {
        encode_scan(dec, &writer, &script[i], &tokens, &places[i]);
        places[i].loss = pcr_loss_after(dec, script, i, loss);
    }
    put_marker(&writer, 0xD9, 0);
    free(tokens.data);
    dec->output = (pcr_buffer){writer.data, writer.capacity};
    *out = writer.data;
    *out_size = writer.size;
    if (tokens.overflow)
        return pcr_fail(dec, PCR_CORRUPT,
                        "expected AC coefficients of at most %d and DC differences of at most %d, "
                        "got more",
                        PCR_MAX_AC, PCR_MAX_DC_DIFFERENCE);
    if (tokens.failed || writer.failed)
        return pcr_fail(dec, PCR_MEMORY, "expected memory for the transcoded stream, got none");
    return PCR_OK;
}

int pcr_rescan(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces,
               const pcr_scan_spec *script, size_t num_scans, const pcr_loss_weights *weights,
               pcr_scan_place *places, const uint8_t **out, size_t *out_size) {
    pcr_loss loss = {0};
    int code = read_coefficients(dec, pieces, num_pieces);
    if (!code) code = check_script(dec, script, num_scans);
    if (!code) code = pcr_loss_start(dec, weights, script, num_scans, &loss);
    if (!code) code = transcode(dec, script, num_scans, &loss, places, out, out_size);
    pcr_loss_free(&loss);
    if (code) return pcr_finish(dec, code);
    pcr_trim_but_output(dec);
    return PCR_OK;
}
