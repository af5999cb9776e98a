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

/* The first of some values of a TIFF type as an integer, 0 if it is none that an orientation may
 * be: Pillow takes any number. */
static int first_value(const uint8_t *p, uint32_t type, bool big) {
    uint64_t bits = 0;
    uint32_t low = read_number(p, 2, big);
    switch (type) {
    case 3:
    case 8: return low <= 8 ? (int)low : 0;
    case 6: return *p <= 8 ? *p : 0;
    case 4:
    case 9:
    case 13: low = read_number(p, 4, big); return low <= 8 ? (int)low : 0;
    case 5:
    case 10: {
        int64_t over = read_number(p, 4, big), under = read_number(p + 4, 4, big);
        if (type == 10) over = (int32_t)over, under = (int32_t)under;
        return under && over % under == 0 && over / under >= 0 && over / under <= 8
                   ? (int)(over / under)
                   : 0;
    }
    case 11: {
        float value;
        low = read_number(p, 4, big);
        memcpy(&value, &low, 4);
        return value >= 0 && value <= 8 && value == (float)(int)value ? (int)value : 0;
    }
    case 12:
    case 16: {
        double value;
        uint64_t first = read_number(p, 4, big), second = read_number(p + 4, 4, big);
        bits = big ? first << 32 | second : second << 32 | first;
        if (type == 16) return bits <= 8 ? (int)bits : 0;
        memcpy(&value, &bits, 8);
        return value >= 0 && value <= 8 && value == (double)(int)value ? (int)value : 0;
    }
    default: return 0;
    }
}

/* Tag 0x0112 of the first directory (EXIF 2.3, section 4.6.4). Where a file breaks the rules, by
 * those of Pillow: what cannot be read ends the directory, an entry of no value is none. */
int pcr_exif_orientation(const uint8_t *exif, size_t size) {
    static const uint8_t units[17] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
    for (int i = 0; i < 2 && size >= 6 && !memcmp(exif, "Exif\0\0", 6); i++) exif += 6, size -= 6;
    if (size < 8 || (memcmp(exif, "MM", 2) && memcmp(exif, "II", 2))) return -1;
    if (memcmp(exif + 2, "\0*", 2) && memcmp(exif + 2, "*\0", 2)) return -1;
    bool big = *exif == 'M';
    uint8_t seen[1 << 13] = {0}; /* tags, a bit of each: of several entries, the first counts */
    uint64_t at = read_number(exif + 4, 4, big), elsewhere = 0;
    if (at + 2 > size) return -1;
    uint32_t entries = read_number(exif + at, 2, big);
    for (at += 2; entries > 0 && at + 12 <= size; entries--, at += 12) {
        const uint8_t *entry = exif + at, *value = entry + 8;
        uint32_t tag = read_number(entry, 2, big), type = read_number(entry + 2, 2, big);
        if (seen[tag / 8] >> tag % 8 & 1 || type > 16 || !units[type]) continue;
        uint64_t bytes = (uint64_t)read_number(entry + 4, 4, big) * units[type];
        if (bytes > 4) {
            uint64_t offset = read_number(value, 4, big);
            elsewhere += bytes;
            if (elsewhere > size) continue;
            if (offset > size || bytes > size - offset) return -1;
            value = exif + offset;
        }
        if (bytes && tag == 0x0112) return first_value(value, type, big);
        if (bytes) seen[tag / 8] |= (uint8_t)(1 << tag % 8);
    }
    return -1;
}

int pcr_xmp_orientation(const uint8_t *payload, size_t size) {
    static const char header[] = "http://ns.adobe.com/xap/1.0/", tag[] = "tiff:Orientation";
    if (size < sizeof header || memcmp(payload, header, sizeof header)) return -1;
    for (size_t at = sizeof header; at + sizeof tag < size; at++) {
        const uint8_t *found = memchr(payload + at, 't', size - at), *end = payload + size;
        if (!found || end - found <= (ptrdiff_t)sizeof tag) break;
        at = (size_t)(found - payload);
        if (memcmp(found, tag, sizeof tag - 1)) continue;
        found += sizeof tag - 1;
        if (*found == '>')
            found++;
        else if (found[0] == '=' && found[1] == '"')
            found += 2;
        else
            continue;
        if (found < end && *found >= '0' && *found <= '9') return *found <= '8' ? *found - '0' : 0;
    }
    return 0;
}

/* EXIF may go on in further segments; of several XMP packets the last one counts. */
static int keep_orientation(pcr_decoder *dec, const uint8_t *p, size_t size) {
    int xmp = pcr_xmp_orientation(p, size);
    if (xmp >= 0) dec->xmp_orientation = xmp;
    if (size < 6 || memcmp(p, "Exif\0\0", 6)) return PCR_OK;
    size_t skip = dec->exif_size ? 6 : 0, need = dec->exif_size + size - skip;
    if (need > dec->exif.capacity) {
        uint8_t *grown = realloc(dec->exif.data, need);
        if (!grown)
            return pcr_fail(dec, PCR_MEMORY, "expected %zu bytes of memory, got none", need);
        dec->exif = (pcr_buffer){grown, need};
    }
    memcpy(dec->exif.data + dec->exif_size, p + skip, size - skip);
    dec->exif_size = need;
    return PCR_OK;
}

static int find_orientation(const pcr_decoder *dec) {
    int exif = dec->exif_size ? pcr_exif_orientation(dec->exif.data, dec->exif_size) : -1;
    return exif >= 0 ? exif : dec->xmp_orientation;
}

static int parse_app(pcr_decoder *dec, int marker, const uint8_t *p, int size) {
    if (dec->num_scans) return PCR_OK; /* libjpeg chooses the color space at the first scan */
    if (marker == M_APP0 && size >= 14 && memcmp(p, "JFIF", 5) == 0) {
        dec->saw_jfif = true;
        memcpy(dec->jfif, p + 5, sizeof dec->jfif);
    }
    if (marker == M_APP14 && size >= 12 && memcmp(p, "Adobe", 5) == 0) {
        dec->saw_adobe = true;
        dec->adobe_transform = p[11];
    }
    return marker == M_APP1 ? keep_orientation(dec, p, (size_t)size) : PCR_OK;
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
        return parse_app(dec, marker, p, size);
    }
}

void pcr_start_stream(pcr_decoder *dec, const pcr_piece *pieces, size_t num_pieces) {
    pcr_cursor_init(&dec->cursor, pieces, num_pieces);
    dec->message[0] = 0;
    dec->have_frame = dec->saw_tables = dec->saw_jfif = dec->saw_adobe = false;
    dec->exif_size = 0;
    dec->orientation = dec->xmp_orientation = 0;
    dec->adobe_transform = dec->restart_interval = dec->num_scans = 0;
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
    dec->orientation = find_orientation(dec);
    return code;
}
