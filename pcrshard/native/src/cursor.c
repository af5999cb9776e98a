/* Walks the scattered pieces of a stream; copies entropy data out of them without byte stuffing. */
#include <stdlib.h>

#include "pcr_internal.h"

void pcr_cursor_init(pcr_cursor *cursor, const pcr_piece *pieces, size_t num_pieces) {
    *cursor = (pcr_cursor){.pieces = pieces, .num_pieces = num_pieces};
    for (size_t i = 0; i < num_pieces; i++) cursor->total += pieces[i].size;
}

/* The contiguous bytes at the cursor; 0 only at the end of the stream. */
static size_t contiguous(pcr_cursor *cursor, const uint8_t **data) {
    while (cursor->index < cursor->num_pieces &&
           cursor->offset == cursor->pieces[cursor->index].size) {
        cursor->index++;
        cursor->offset = 0;
    }
    if (cursor->index == cursor->num_pieces) return 0;
    *data = cursor->pieces[cursor->index].data + cursor->offset;
    return cursor->pieces[cursor->index].size - cursor->offset;
}

static void advance(pcr_cursor *cursor, size_t size) {
    cursor->offset += size;
    cursor->consumed += size;
}

int pcr_cursor_byte(pcr_cursor *cursor) {
    const uint8_t *data;
    if (!contiguous(cursor, &data)) return -1;
    advance(cursor, 1);
    return *data;
}

int pcr_reserve(pcr_decoder *dec, pcr_buffer *buffer, size_t size) {
    if (size <= buffer->capacity) return PCR_OK;
    /* Nothing in a buffer outlives a call that grows it, so its bytes need not be copied. */
    free(buffer->data);
    buffer->capacity = 0;
    buffer->data = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!buffer->data)
        return pcr_fail(dec, PCR_MEMORY, "expected %zu bytes of memory, got none", size);
    buffer->capacity = size;
    return PCR_OK;
}

const uint8_t *pcr_cursor_take(pcr_decoder *dec, size_t size) {
    pcr_cursor *cursor = &dec->cursor;
    const uint8_t *data = (const uint8_t *)"";
    size_t have = contiguous(cursor, &data);
    if (have >= size) {
        advance(cursor, size);
        return data;
    }
    if (pcr_reserve(dec, &dec->payload, size)) return NULL;
    for (size_t done = 0; done < size; done += have) {
        have = contiguous(cursor, &data);
        if (have == 0) return NULL;
        if (have > size - done) have = size - done;
        memcpy(dec->payload.data + done, data, have);
        advance(cursor, have);
    }
    return dec->payload.data;
}

/* After an 0xFF: returns the marker, 0 when the 0xFF was data, -1 at the end of the stream. */
static int after_ff(pcr_cursor *cursor) {
    int byte;
    do byte = pcr_cursor_byte(cursor);
    while (byte == 0xFF); /* fill bytes, T.81 B.1.1.2 */
    return byte;
}

/* Moves the entropy data up to the next marker into dec->segment, byte stuffing removed (T.81
 * B.1.1.5), zeros after it, and points the bit reader at it. The marker goes to pending_marker;
 * the end of the stream counts as EOI, because a prefix ends after any scan. */
int pcr_next_segment(pcr_decoder *dec) {
    pcr_cursor *cursor = &dec->cursor;
    int code = pcr_reserve(dec, &dec->segment, cursor->total - cursor->consumed + PCR_SEGMENT_PAD);
    if (code) return code;
    uint8_t *out = dec->segment.data;
    int marker = 0;
    while (marker == 0) {
        const uint8_t *data;
        size_t have = contiguous(cursor, &data);
        if (have == 0) {
            marker = 0xD9;
            break;
        }
        size_t plain = dec->kernels->copy_plain(out, data, have);
        out += plain;
        advance(cursor, plain);
        if (plain == have) continue;
        advance(cursor, 1);
        marker = after_ff(cursor);
        if (marker < 0) marker = 0xD9;
        if (marker == 0) *out++ = 0xFF;
    }
    memset(out, 0, PCR_SEGMENT_PAD);
    dec->pending_marker = marker;
    dec->scan.bits = (pcr_bits){.data = dec->segment.data,
                                .size = (size_t)(out - dec->segment.data)};
    return PCR_OK;
}

size_t pcr_scan_end(const uint8_t *data, size_t size, size_t start) {
    for (size_t at = start; at + 1 < size; at++) {
        const uint8_t *found = memchr(data + at, 0xFF, size - 1 - at);
        if (!found) break;
        at = (size_t)(found - data);
        int next = found[1];
        if (next == 0 || next == 0xFF || (next >= 0xD0 && next <= 0xD7)) continue;
        while (at > start && data[at - 1] == 0xFF) at--;
        return at;
    }
    return size;
}
