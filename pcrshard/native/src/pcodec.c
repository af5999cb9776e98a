/* Encoder of pcodec files of int32 in the mode "classic", twice as fast as the library's.
 *
 * Format: https://github.com/pcodec/pcodec/blob/main/docs/format.md. A chunk has bins: ranges of
 * values whose sizes are powers of two. A value is coded as its bin, by tANS, and its offset in the
 * bin, as plain bits. */
#include <math.h>
#include <string.h>

#include "avx2.h"
#include "numbers.h"

/* Compiled twice, for any processor and for AVX2. */
#define INLINE static inline __attribute__((always_inline))

#define CHUNK ((size_t)1 << 18)
#define BATCH 256
#define STATES 4
/* Wider ranges are left to the library: they would take a larger histogram. */
#define RANGE_BITS 16
#define MAX_TABLE_BITS 11
#define MAX_BINS 256
/* No node is split above this number; each of the levels under way may add one more bin. */
#define BINS_LIMIT (MAX_BINS - RANGE_BITS - 1)
/* Weight, lower bound, and number of offset bits. */
#define BIN_BITS (MAX_TABLE_BITS + 32 + 6)
/* Nodes with less than 1/512 of a chunk's values are not split. */
#define SPLIT_SHARE 512
#define INT32_TYPE 3

typedef struct {
    uint32_t low, count, weight;
    uint8_t bits;
} bin;

typedef struct {
    uint32_t sums[((size_t)1 << RANGE_BITS) + 1];
    uint16_t codes[CHUNK];
    uint8_t symbols[CHUNK];
    uint8_t bin_of[(size_t)1 << RANGE_BITS];
    uint16_t next[1 << MAX_TABLE_BITS];
    bin bins[MAX_BINS];
    int num_bins;
} scratch;

size_t pcr_pcodec_scratch(void) { return sizeof(scratch); }

size_t pcr_pcodec_bound(size_t count) {
    size_t chunks = (count + CHUNK - 1) / CHUNK;
    /* A value takes at most 16 bits of offset and MAX_TABLE_BITS for its bin. */
    return 32 + chunks * (32 + MAX_BINS * BIN_BITS / 8) + 4 * count;
}

static int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

typedef struct {
    uint8_t *at;
    uint64_t bits;
    unsigned count;
} writer;

/* Writes the whole bytes; 56 more bits then fit. */
INLINE void flush(writer *w) {
    uint64_t bits = w->bits;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    memcpy(w->at, &bits, 8);
    w->at += w->count >> 3;
    w->bits = w->bits >> (w->count & 56);
    w->count &= 7;
}

INLINE void put(writer *w, uint64_t value, unsigned bits) {
    w->bits |= value << w->count;
    w->count += bits;
}

INLINE void write_bits(writer *w, uint64_t value, unsigned bits) {
    put(w, value, bits);
    flush(w);
}

static void align(writer *w) {
    w->count = (w->count + 7) & ~7u;
    flush(w);
}

/* Adds the bins of a node of the binary tree over the range, in increasing order, and returns their
 * estimated bits: bins, offsets, and the choice of bins below the node. Halves a node if that takes
 * fewer bits. */
static double split(scratch *s, uint32_t start, int bits, uint32_t size, uint32_t least) {
    uint64_t stop = (uint64_t)start + ((uint64_t)1 << bits);
    uint32_t count = s->sums[stop < size ? stop : size] - s->sums[start < size ? start : size];
    if (count == 0) return 0;
    int first = s->num_bins;
    double whole = BIN_BITS + (double)count * bits;
    if (bits && count > least && first < BINS_LIMIT) {
        uint32_t middle = start + ((uint32_t)1 << (bits - 1));
        uint32_t left = s->sums[middle < size ? middle : size] - s->sums[start];
        uint32_t right = count - left;
        double cost = (left ? left * log2((double)count / left) : 0) +
                      (right ? right * log2((double)count / right) : 0);
        cost += split(s, start, bits - 1, size, least) + split(s, middle, bits - 1, size, least);
        if (cost < whole) return cost;
    }
    s->num_bins = first + 1;
    s->bins[first] = (bin){.low = start, .count = count, .bits = (uint8_t)bits};
    return whole;
}

typedef struct {
    int32_t growth; /* gives the number of bits that a state loses, in the upper half of a sum */
    int32_t base;   /* of the symbol's part of the table */
} transition;

/* Sets the weights, at least 1 each and proportional to the counts; returns log2 of their sum. */
static int weigh(scratch *s, size_t count) {
    int used = s->num_bins;
    if (used == 1) {
        s->bins[0].weight = 1;
        return 0;
    }
    int bits = bit_length(count) - 2, least = bit_length((uint64_t)used - 1);
    bits = bits > MAX_TABLE_BITS ? MAX_TABLE_BITS : bits;
    bits = bits < least ? least : bits;
    uint64_t seen = 0, start = 0, rest = ((uint64_t)1 << bits) - (uint64_t)used;
    for (int i = 0; i < used; i++) {
        seen += s->bins[i].count;
        uint64_t stop = (seen * rest + count / 2) / count + (uint64_t)i + 1;
        s->bins[i].weight = (uint32_t)(stop - start);
        start = stop;
    }
    return bits;
}

/* Builds the tANS encoder: the states to which a symbol leads from each of its intervals. */
static void tabulate(scratch *s, int bits, transition transitions[MAX_BINS]) {
    uint32_t size = (uint32_t)1 << bits, step = 0, stride = 3 * size / 5 | 1, start = 0;
    uint8_t symbol_at[1 << MAX_TABLE_BITS];
    uint32_t filled[MAX_BINS];
    for (int i = 0; i < s->num_bins; i++) {
        uint32_t weight = s->bins[i].weight;
        for (uint32_t n = 0; n < weight; n++) symbol_at[stride * step++ & (size - 1)] = (uint8_t)i;
        int lost = bits + 1 - bit_length(2 * weight - 1);
        transitions[i].growth = (int32_t)((lost + 1) << 16) - (int32_t)(2 * weight << lost);
        transitions[i].base = (int32_t)start - (int32_t)weight;
        filled[i] = start;
        start += weight;
    }
    for (uint32_t i = 0; i < size; i++) s->next[filled[symbol_at[i]]++] = (uint16_t)(size + i);
}

/* Encodes symbols, last one first: codes[i] becomes the bits of one, above them their number. */
INLINE void encode_symbols(scratch *s, size_t count, const transition *table,
                           uint32_t states[STATES]) {
    uint32_t a = states[0], b = states[1], c = states[2], d = states[3];
#define ENCODE(state, i)                                                                         \
    do {                                                                                         \
        const transition *t = table + s->symbols[i];                                             \
        uint32_t lost = (state + (uint32_t)t->growth) >> 16;                                     \
        s->codes[i] = (uint16_t)(lost << 12 | (state & (((uint32_t)1 << lost) - 1)));            \
        state = s->next[(int32_t)(state >> lost) + t->base];                                     \
    } while (0)
    size_t i = count;
    switch (count % STATES) {
        case 3: i--; ENCODE(c, i); /* fall through */
        case 2: i--; ENCODE(b, i); /* fall through */
        case 1: i--; ENCODE(a, i); /* fall through */
        default: break;
    }
    while (i) {
        i -= STATES;
        ENCODE(d, i + 3);
        ENCODE(c, i + 2);
        ENCODE(b, i + 1);
        ENCODE(a, i);
    }
    states[0] = a, states[1] = b, states[2] = c, states[3] = d;
}

/* Returns the end of the output, or NULL if the range of the values is too wide. */
INLINE uint8_t *encode_chunk(const int32_t *values, size_t count, uint8_t *out, scratch *s) {
    int32_t low = values[0], high = values[0];
    for (size_t i = 0; i < count; i++) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    uint32_t range = (uint32_t)high - (uint32_t)low;
    uint32_t size = range + 1;
    if (range >> RANGE_BITS) return NULL;
    memset(s->sums, 0, (size + 1) * sizeof *s->sums);
    for (size_t i = 0; i < count; i++) s->sums[values[i] - low + 1]++;
    for (uint32_t i = 0; i < size; i++) s->sums[i + 1] += s->sums[i];
    s->num_bins = 0;
    split(s, 0, bit_length(range), size, (uint32_t)(count / SPLIT_SHARE));
    int table_bits = weigh(s, count);

    writer w = {.at = out};
    write_bits(&w, INT32_TYPE, 8);
    write_bits(&w, count - 1, 24);
    write_bits(&w, 0, 8); /* mode and delta encoding */
    write_bits(&w, (uint64_t)table_bits, 4);
    write_bits(&w, (uint64_t)s->num_bins, 15);
    unsigned most = 0;
    for (int i = 0; i < s->num_bins; i++) {
        bin *b = s->bins + i;
        uint32_t last = b->low + ((uint32_t)1 << b->bits) - 1;
        memset(s->bin_of + b->low, i, (last < size ? last + 1 : size) - b->low);
        most = b->bits > most ? b->bits : most;
        write_bits(&w, b->weight - 1, (unsigned)table_bits);
        write_bits(&w, (uint32_t)low + b->low + 0x80000000u, 32); /* as pcodec orders int32 */
        write_bits(&w, b->bits, 6);
    }
    align(&w);

    for (size_t i = 0; i < count; i++) s->symbols[i] = s->bin_of[values[i] - low];
    uint32_t states[STATES];
    for (int j = 0; j < STATES; j++) states[j] = (uint32_t)1 << table_bits;
    if (table_bits) {
        transition transitions[MAX_BINS];
        tabulate(s, table_bits, transitions);
        encode_symbols(s, count, transitions, states);
    }
    for (int j = 0; j < STATES; j++) {
        write_bits(&w, states[j] - ((uint32_t)1 << table_bits), (unsigned)table_bits);
    }
    align(&w);
    size_t group = most <= 12 ? 4 : 2; /* offsets that fit between two flushes */
    for (size_t start = 0; start < count; start += BATCH) {
        size_t stop = start + BATCH < count ? start + BATCH : count;
        for (size_t i = start; table_bits && i < stop; i += 4) {
            for (size_t j = i; j < i + 4 && j < stop; j++)
                put(&w, s->codes[j] & 4095, s->codes[j] >> 12);
            flush(&w);
        }
        for (size_t i = start; most && i < stop; i += group) {
            for (size_t j = i; j < i + group && j < stop; j++) {
                const bin *b = s->bins + s->symbols[j];
                put(&w, (uint32_t)(values[j] - low) - b->low, b->bits);
            }
            flush(&w);
        }
    }
    align(&w);
    return w.at;
}

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN
static uint8_t *encode_chunk_avx2(const int32_t *values, size_t count, uint8_t *out, scratch *s) {
    return encode_chunk(values, count, out, s);
}
PCR_AVX2_END
#endif

static uint8_t *encode_chunk_best(const int32_t *values, size_t count, uint8_t *out, scratch *s) {
#if PCR_HAVE_VECTORS
    if (pcr_have_vectors()) return encode_chunk_avx2(values, count, out, s);
#endif
    return encode_chunk(values, count, out, s);
}

size_t pcr_pcodec_encode(const int32_t *values, size_t count, uint8_t *out, void *memory) {
    static const uint8_t head[] = {'p', 'c', 'o', '!', 3, 0};
    memcpy(out, head, sizeof head);
    writer w = {.at = out + sizeof head};
    unsigned bits = (unsigned)bit_length(count);
    write_bits(&w, bits - 1, 6);
    write_bits(&w, count & 0xffffffffu, bits < 32 ? bits : 32);
    write_bits(&w, count >> 16 >> 16, bits < 32 ? 0 : bits - 32);
    align(&w);
    write_bits(&w, 4, 8); /* format version 4.0 */
    write_bits(&w, 0, 8);
    uint8_t *at = w.at;
    for (size_t i = 0; i < count; i += CHUNK) {
        at = encode_chunk_best(values + i, count - i < CHUNK ? count - i : CHUNK, at, memory);
        if (!at) return 0;
    }
    *at++ = 0;
    return (size_t)(at - out);
}
