/* Marker segments (T.81 Annex B): everything between SOI and a scan's entropy data. */
#include <stdlib.h>

#include "pcr_internal.h"

enum {
    M_SOF0 = 0xC0, M_SOF1 = 0xC1, M_SOF2 = 0xC2, M_SOF15 = 0xCF,
    M_DHT = 0xC4, M_JPG = 0xC8, M_DAC = 0xCC,
    M_RST0 = 0xD0, M_RST7 = 0xD7,
    M_SOI = 0xD8, M_EOI = 0xD9, M_SOS = 0xDA, M_DQT = 0xDB, M_DRI = 0xDD,
    M_APP0 = 0xE0, M_APP1 = 0xE1, M_APP14 = 0xEE
};

static int corrupt(pcr_decoder *dec, const char *expected, int got) {
    return pcr_fail(dec, PCR_CORRUPT, "expected %s, got %d", expected, got);
}

static int truncated(pcr_decoder *dec, const char *where) {
    return pcr_fail(dec, PCR_CORRUPT, "expected more bytes in %s, got the end of the stream",
                    where);
}

/* Next marker, skipping bytes that are none, as libjpeg does; EOI at the end of the stream. */
static int next_marker(pcr_decoder *dec) {
    int byte = dec->pending_marker;
    dec->pending_marker = 0;
    if (byte) return byte;
    do {
        do byte = pcr_cursor_byte(&dec->cursor);
        while (byte >= 0 && byte != 0xFF);
        while (byte == 0xFF) byte = pcr_cursor_byte(&dec->cursor);
    } while (byte == 0);
    return byte < 0 ? M_EOI : byte;
}

/* The parameters of a segment, contiguous; NULL when the stream ends first. */
static const uint8_t *take_segment(pcr_decoder *dec, int *size) {
    const uint8_t *length = pcr_cursor_take(dec, 2);
    if (!length) return NULL;
    *size = (length[0] << 8 | length[1]) - 2;
    return *size < 0 ? NULL : pcr_cursor_take(dec, (size_t)*size);
}

static int parse_dqt(pcr_decoder *dec, const uint8_t *p, int size) {
    while (size > 0) {
        int wide = *p >> 4, slot = *p & 15, need = 1 + 64 * (wide + 1);
        if (wide > 1 || slot > 3)
            return corrupt(dec, "a quantization table 0..3 of 8 or 16 bits", *p);
        if (size < need) return corrupt(dec, "a whole quantization table", size);
        for (int k = 0; k < 64; k++)
            dec->quant[slot][k] = wide ? (uint16_t)(p[1 + 2 * k] << 8 | p[2 + 2 * k]) : p[1 + k];
        dec->quant_present[slot] = true;
        p += need, size -= need;
    }
    return PCR_OK;
}

static int parse_dht(pcr_decoder *dec, const uint8_t *p, int size) {
    dec->saw_tables = true;
    while (size > 0) {
        int class = *p >> 4, slot = *p & 15, total = 0;
        if (class > 1 || slot > 3) return corrupt(dec, "a Huffman table 0..3 of class 0 or 1", *p);
        if (size < 17) return corrupt(dec, "17 bytes of Huffman code lengths", size);
        for (int i = 1; i <= 16; i++) total += p[i];
        if (total > 256 || size < 17 + total)
            return corrupt(dec, "a whole Huffman table of at most 256 codes", total);
        pcr_huffman *table = &dec->huffman[class][slot];
        memcpy(table->counts, p, 17);
        memcpy(table->symbols, p + 17, (size_t)total);
        table->present = true;
        table->built = false;
        p += 17 + total, size -= 17 + total;
    }
    return PCR_OK;
}

static uint32_t read_number(const uint8_t *p, int size, bool big_endian) {
    uint32_t number = 0;
    for (int i = 0; i < size; i++) number = number << 8 | p[big_endian ? i : size - 1 - i];
    return number;
}

/* Tag 0x0112 of the first directory: EXIF 2.3, section 4.6.4. */
int pcr_exif_orientation(const uint8_t *payload, size_t size) {
    if (size < 14 || memcmp(payload, "Exif\0\0", 6)) return 0;
    const uint8_t *tiff = payload + 6;
    bool big = memcmp(tiff, "MM\0*", 4) == 0;
    if (!big && memcmp(tiff, "II*\0", 4)) return 0;
    uint64_t at = read_number(tiff + 4, 4, big);
    size -= 6;
    if (at + 2 > size) return 0;
    uint32_t entries = read_number(tiff + at, 2, big);
    for (at += 2; entries > 0 && at + 12 <= size; entries--, at += 12) {
        const uint8_t *entry = tiff + at;
        /* Some writers use LONG (4) where the standard says SHORT (3). */
        uint32_t type = read_number(entry + 2, 2, big);
        if (read_number(entry, 2, big) != 0x0112 || (type != 3 && type != 4) ||
            read_number(entry + 4, 4, big) != 1)
            continue;
        uint32_t value = read_number(entry + 8, type == 3 ? 2 : 4, big);
        return value <= 8 ? (int)value : 0;
    }
    return 0;
}

static void parse_app(pcr_decoder *dec, int marker, const uint8_t *p, int size) {
    if (dec->num_scans) return; /* libjpeg chooses the color space at the first scan */
    if (marker == M_APP0 && size >= 14 && memcmp(p, "JFIF", 5) == 0) {
        dec->saw_jfif = true;
        memcpy(dec->jfif, p + 5, sizeof dec->jfif);
    }
    if (marker == M_APP1 && !dec->orientation)
        dec->orientation = pcr_exif_orientation(p, (size_t)size);
    if (marker == M_APP14 && size >= 12 && memcmp(p, "Adobe", 5) == 0) {
        dec->saw_adobe = true;
        dec->adobe_transform = p[11];
    }
}

/* The color space that libjpeg assumes (jdapimin.c default_decompress_parms). */
static int find_color(const pcr_decoder *dec) {
    const pcr_component *c = dec->comp;
    if (dec->num_components == 1) return PCR_COLOR_GRAY;
    if (dec->num_components == 4)
        return !dec->saw_adobe || dec->adobe_transform == 0 ? PCR_COLOR_CMYK : PCR_COLOR_YCCK;
    if (dec->saw_jfif) return PCR_COLOR_YCC;
    if (dec->saw_adobe) return dec->adobe_transform == 0 ? PCR_COLOR_RGB : PCR_COLOR_YCC;
    return c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B' ? PCR_COLOR_RGB : PCR_COLOR_YCC;
}

static int parse_component(pcr_decoder *dec, pcr_component *comp, const uint8_t *p) {
    *comp = (pcr_component){.id = p[0], .h = p[1] >> 4, .v = p[1] & 15, .tq = p[2], .needed = true};
    memset(comp->precision, -1, sizeof comp->precision);
    if (comp->h < 1 || comp->h > 4 || comp->v < 1 || comp->v > 4)
        return corrupt(dec, "sampling factors of 1 to 4", p[1]);
    if (comp->tq > 3) return corrupt(dec, "a quantization table 0..3", comp->tq);
    for (const pcr_component *other = dec->comp; other < comp; other++)
        if (other->id == comp->id) return corrupt(dec, "component ids that differ", comp->id);
    dec->h_max = pcr_max(dec->h_max, comp->h);
    dec->v_max = pcr_max(dec->v_max, comp->v);
    return PCR_OK;
}

/* T.81 A.1.1 and A.2.4. Factors that do not divide the largest can be transcoded; pixels of them
 * are refused when the decode is planned. */
static void measure(pcr_decoder *dec) {
    for (int c = 0; c < dec->num_components; c++) {
        pcr_component *comp = &dec->comp[c];
        comp->blocks_w = pcr_ceil_div(pcr_ceil_div(dec->width * comp->h, dec->h_max), 8);
        comp->blocks_h = pcr_ceil_div(pcr_ceil_div(dec->height * comp->v, dec->v_max), 8);
    }
    dec->mcus_w = pcr_ceil_div(dec->width, 8 * dec->h_max);
    dec->mcus_h = pcr_ceil_div(dec->height, 8 * dec->v_max);
}

static int parse_sof(pcr_decoder *dec, int marker, const uint8_t *p, int size) {
    if (dec->have_frame) return corrupt(dec, "one frame header, another marker", marker);
    if (marker > M_SOF2)
        return pcr_fail(dec, PCR_UNSUPPORTED,
                        "expected Huffman-coded sequential or progressive DCT, "
                        "got frame type SOF%d",
                        marker - M_SOF0);
    if (size < 6 || size != 6 + 3 * p[5])
        return corrupt(dec, "a frame header whose length fits its components", size);
    if (p[0] != 8)
        return pcr_fail(dec, PCR_UNSUPPORTED, "expected 8 bits per sample, got %d", p[0]);
    dec->height = p[1] << 8 | p[2], dec->width = p[3] << 8 | p[4], dec->num_components = p[5];
    if (dec->width == 0) return corrupt(dec, "a width of at least 1", 0);
    if (dec->height == 0)
        return pcr_fail(dec, PCR_UNSUPPORTED,
                        "expected the height in the frame header, got 0 (DNL is not supported)");
    if ((int64_t)dec->width * dec->height > dec->max_pixels)
        return pcr_fail(dec, PCR_LIMIT, "expected at most %lld pixels, got %dx%d",
                        (long long)dec->max_pixels, dec->width, dec->height);
    if (dec->num_components != 1 && dec->num_components != 3 && dec->num_components != 4)
        return pcr_fail(dec, PCR_UNSUPPORTED, "expected 1, 3 or 4 components, got %d",
                        dec->num_components);
    dec->progressive = marker == M_SOF2;
    for (int c = 0; c < dec->num_components; c++) {
        int code = parse_component(dec, &dec->comp[c], p + 6 + 3 * c);
        if (code) return code;
    }
    /* Factors of a single component mean nothing (T.81 A.2.2). */
    if (dec->num_components == 1) dec->comp->h = dec->comp->v = dec->h_max = dec->v_max = 1;
    dec->have_frame = true;
    measure(dec);
    return PCR_OK;
}

/* T.81 B.2.3, G.1.1.1: which coefficients the scan brings, and that it brings them in order. */
static int check_progression(pcr_decoder *dec, pcr_scan *scan) {
    if (scan->ss > scan->se || scan->se > 63 || scan->al > 13)
        return pcr_fail(dec, PCR_CORRUPT,
                        "expected a band within 0..63 and Al of at most 13, got %d..%d, Al %d",
                        scan->ss, scan->se, scan->al);
    if (scan->ss == 0 ? scan->se != 0 : scan->num_components != 1)
        return corrupt(dec, "DC alone or AC of one component, band end", scan->se);
    if (scan->ah && scan->ah != scan->al + 1) return corrupt(dec, "Ah to be 0 or Al + 1", scan->ah);
    for (int c = 0; c < scan->num_components; c++) {
        pcr_component *comp = scan->comp[c];
        if (scan->ss > 0 && comp->precision[0] < 0)
            return corrupt(dec, "DC before AC, component", comp->id);
        for (int k = scan->ss; k <= scan->se; k++) {
            int expected = comp->precision[k] < 0 ? 0 : comp->precision[k];
            if (scan->ah != expected || comp->precision[k] == 0)
                return pcr_fail(dec, PCR_CORRUPT,
                                "expected coefficient %d of component %d to continue at Ah %d, got "
                                "%d", k, comp->id, expected, scan->ah);
            comp->precision[k] = (int8_t)scan->al;
        }
    }
    return PCR_OK;
}

static int check_sequential(pcr_decoder *dec, pcr_scan *scan) {
    /* some encoders write others; libjpeg ignores them */
    scan->ss = 0, scan->se = 63, scan->ah = scan->al = 0;
    for (int c = 0; c < scan->num_components; c++) {
        if (scan->comp[c]->precision[0] >= 0)
            return corrupt(dec, "one scan per component, component", scan->comp[c]->id);
        memset(scan->comp[c]->precision, 0, 64);
    }
    return PCR_OK;
}

static int parse_sos(pcr_decoder *dec, const uint8_t *p, int size) {
    pcr_scan *scan = &dec->scan;
    if (!dec->have_frame)
        return corrupt(dec, "a frame header before the first scan, frame headers", 0);
    if (++dec->num_scans > PCR_MAX_SCANS)
        return pcr_fail(dec, PCR_LIMIT, "expected at most %d scans", PCR_MAX_SCANS);
    /* Motion JPEG leaves out the tables that it uses. */
    if (!dec->saw_tables && !dec->progressive)
        parse_dht(dec, pcr_standard_tables, PCR_STANDARD_TABLES_SIZE);
    int count = size > 0 ? p[0] : 0, blocks = 0;
    if (count < 1 || count > dec->num_components || size != 4 + 2 * count)
        return corrupt(dec, "a scan header whose length fits its components", size);
    *scan = (pcr_scan){.num_components = count};
    for (int i = 0; i < count; i++) {
        pcr_component *comp = dec->comp, *end = dec->comp + dec->num_components;
        while (comp < end && comp->id != p[1 + 2 * i]) comp++;
        if (comp == end) return corrupt(dec, "a component of the frame", p[1 + 2 * i]);
        /* Components of a scan come in the frame's order (T.81 B.2.3), hence none twice. */
        if (i && comp <= scan->comp[i - 1])
            return corrupt(dec, "components in the frame's order", comp->id);
        int tables = p[2 + 2 * i];
        if ((tables >> 4) > 3 || (tables & 15) > 3)
            return corrupt(dec, "Huffman tables 0..3", tables);
        scan->comp[i] = comp;
        scan->dc[i] = &dec->huffman[0][tables >> 4];
        scan->ac[i] = &dec->huffman[1][tables & 15];
        scan->h[i] = count == 1 ? 1 : comp->h, scan->v[i] = count == 1 ? 1 : comp->v;
        blocks += scan->h[i] * scan->v[i];
    }
    if (blocks > PCR_MAX_MCU_BLOCKS) return corrupt(dec, "at most 10 blocks in an MCU", blocks);
    p += 1 + 2 * count;
    scan->ss = p[0], scan->se = p[1], scan->ah = p[2] >> 4, scan->al = p[2] & 15;
    scan->mcus_w = count == 1 ? scan->comp[0]->blocks_w : dec->mcus_w;
    scan->mcus_h = count == 1 ? scan->comp[0]->blocks_h : dec->mcus_h;
    return dec->progressive ? check_progression(dec, scan) : check_sequential(dec, scan);
}

static int parse_segment(pcr_decoder *dec, int marker, const uint8_t *p, int size) {
    switch (marker) {
    case M_DQT: return parse_dqt(dec, p, size);
    case M_DHT: return parse_dht(dec, p, size);
    case M_SOS: return parse_sos(dec, p, size);
    case M_DAC:
        return pcr_fail(dec, PCR_UNSUPPORTED,
                        "expected Huffman coding, got arithmetic conditioning");
    case M_DRI:
        if (size != 2) return corrupt(dec, "a restart interval of 2 bytes", size);
        dec->restart_interval = p[0] << 8 | p[1];
        return PCR_OK;
    default:
        if (marker >= M_SOF0 && marker <= M_SOF15 && marker != M_JPG)
            return parse_sof(dec, marker, p, size);
        parse_app(dec, marker, p, size);
        return PCR_OK;
    }
}

void pcr_start_stream(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces) {
    pcr_cursor_init(&dec->cursor, pieces, num_pieces);
    dec->message[0] = 0;
    dec->have_frame = dec->saw_tables = dec->saw_jfif = dec->saw_adobe = false;
    dec->adobe_transform = dec->orientation = dec->restart_interval = dec->num_scans = 0;
    dec->h_max = dec->v_max = 1;
    dec->pending_marker = 0;
    dec->visits = 0;
    dec->rows_decoded = 0;
    dec->one_scan = dec->streaming = false;
    dec->max_pixels = PCR_DEFAULT_MAX_PIXELS;
    dec->output_bytes = 0;
    memset(dec->quant_present, 0, sizeof dec->quant_present);
    for (int i = 0; i < 8; i++) dec->huffman[i / 4][i % 4].present = false;
}

/* Reads segments until `stop_at_frame` and a frame header, a scan header, or the end. */
static int parse_until(pcr_decoder *dec, bool stop_at_frame, bool *found) {
    for (*found = false; !*found;) {
        int marker = next_marker(dec), size;
        if (marker == M_EOI) return PCR_OK;
        if (marker == 0x01 || (marker >= M_RST0 && marker <= M_SOI))
            return pcr_fail(dec, PCR_CORRUPT, "expected a marker segment, got marker 0x%02X",
                            marker);
        const uint8_t *p = take_segment(dec, &size);
        if (!p) return dec->message[0] ? PCR_MEMORY : truncated(dec, "a marker segment");
        int code = parse_segment(dec, marker, p, size);
        if (code) return code;
        *found = stop_at_frame ? dec->have_frame : marker == M_SOS;
    }
    return PCR_OK;
}

/* SOI up to the frame header. */
int pcr_parse_frame(pcr_decoder *dec) {
    int first = pcr_cursor_byte(&dec->cursor), second = pcr_cursor_byte(&dec->cursor);
    bool found;
    if (!dec->cursor.total) return pcr_fail(dec, PCR_CORRUPT, "expected a JPEG, got no bytes");
    if (first != 0xFF || second != M_SOI)
        return pcr_fail(dec, PCR_CORRUPT,
                        "expected a JPEG that starts with FF D8, got %02X %02X in %zu bytes",
                        first & 0xFF, second & 0xFF, dec->cursor.total);
    int code = parse_until(dec, true, &found);
    if (code) return code;
    if (!found) return pcr_fail(dec, PCR_CORRUPT, "expected a frame header, got none");
    return PCR_OK;
}

int pcr_parse_to_scan(pcr_decoder *dec, bool *found) {
    int code = parse_until(dec, false, found);
    dec->color = find_color(dec);
    return code;
}
