/* Bit reader: 64-bit reservoir over entropy data from which byte stuffing was already removed. */
#ifndef PCR_BITS_H
#define PCR_BITS_H

#include "pcr_internal.h"

static inline uint64_t pcr_load_be64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

/* Afterwards at least 56 bits are valid. Past the end zeros are fed, which pcr_overrun() reports;
 * reading on costs nothing there and saves a test per symbol. */
static inline void pcr_refill(pcr_bits *b) {
    if (PCR_LIKELY(b->pos <= b->size)) b->bits |= pcr_load_be64(b->data + b->pos) >> b->count;
    b->pos += (63 - b->count) >> 3;
    b->count |= 56;
}

static inline void pcr_consume(pcr_bits *b, uint32_t n) {
    b->bits <<= n;
    b->count -= n;
}

/* Consumes what an entry of the fast table says. The shift is on the critical path of every symbol:
 * its count is masked by the instruction itself, the other use of it is not waited for. */
static inline void pcr_consume_entry(pcr_bits *b, uint32_t entry) {
    b->bits <<= entry & 63;
    b->count -= (uint8_t)entry;
}

/* n in 0..56 bits, after a refill. */
static inline uint64_t pcr_take(pcr_bits *b, uint32_t n) {
    uint64_t value = (b->bits >> 1) >> (63 - n);
    pcr_consume(b, n);
    return value;
}

/* Bit position of the next bit. */
static inline uint64_t pcr_tell(const pcr_bits *b) { return b->pos * 8 - b->count; }

/* The bits from position `at` on, 57 of them valid; at most PCR_SEGMENT_PAD bytes past the end. */
static inline uint64_t pcr_window(const pcr_bits *b, uint64_t at) {
    return pcr_load_be64(b->data + (at >> 3)) << (at & 7);
}

static inline bool pcr_past_end(const pcr_bits *b, uint64_t at) {
    return at > (uint64_t)b->size * 8;
}

static inline void pcr_seek(pcr_bits *b, uint64_t at) {
    b->pos = at >> 3;
    b->bits = 0;
    b->count = 0;
    pcr_refill(b);
    pcr_consume(b, at & 7);
}

static inline bool pcr_overrun(const pcr_bits *b) { return pcr_past_end(b, pcr_tell(b)); }

/* T.81 F.2.2.1 EXTEND of the next s bits, s in 1..15. */
static inline int32_t pcr_take_signed(pcr_bits *b, uint32_t s) {
    int32_t value = (int32_t)pcr_take(b, s);
    return value < (1 << (s - 1)) ? value - (1 << s) + 1 : value;
}

/* Symbol whose code is longer than PCR_FAST_BITS; -1 when no code matches. Needs 16 valid bits. */
static inline int pcr_long_symbol(pcr_bits *b, const pcr_huffman *table) {
    uint32_t code = (uint32_t)(b->bits >> 48);
    int length = PCR_FAST_BITS + 1;
    while (length <= 16 && code >= table->limit[length]) length++;
    if (length > 16) return -1;
    int32_t index = (int32_t)(code >> (16 - length)) + table->offset[length];
    pcr_consume(b, (uint32_t)length);
    return table->symbols[index & 255];
}

/* Symbol of an entry marked PCR_SPECIAL; -1 when no code matches. */
static inline int pcr_special_symbol(pcr_bits *b, const pcr_huffman *table, uint32_t entry) {
    if (!PCR_ENTRY_LOW(entry)) return pcr_long_symbol(b, table);
    pcr_consume(b, PCR_ENTRY_LOW(entry));
    return (int)PCR_ENTRY_SYMBOL(entry);
}

#endif
