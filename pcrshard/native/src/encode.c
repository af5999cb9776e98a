/* Optimal Huffman tables (T.81 K.2, as jchuff.c makes them) and the bits of a scan. */
#include <stdlib.h>

#include "encode.h"

typedef struct {
    uint32_t frequency;
    int next; /* symbol in the same tree, or -1 */
    int symbol;
} node;

/* The used symbol of least frequency, the last one of several, other than `other`; -1 when none. */
static int least(const node *nodes, int count, int other) {
    int found = -1;
    uint32_t lowest = UINT32_MAX;
    for (int i = 0; i < count; i++) {
        if (nodes[i].frequency && nodes[i].frequency <= lowest && i != other) {
            lowest = nodes[i].frequency;
            found = i;
        }
    }
    return found;
}

/* Merges the trees of the two rarest until one is left; lengths[] is each node's depth. */
static void code_lengths(node *nodes, int count, int *lengths) {
    for (;;) {
        int a = least(nodes, count, -1), b = least(nodes, count, a);
        if (b < 0) return;
        nodes[a].frequency += nodes[b].frequency;
        nodes[b].frequency = 0;
        for (lengths[a]++; nodes[a].next >= 0; lengths[a]++) a = nodes[a].next;
        nodes[a].next = b;
        for (lengths[b]++; nodes[b].next >= 0; lengths[b]++) b = nodes[b].next;
    }
}

/* Shortens codes to 16 bits (T.81 Figure K.3) and takes out the all-ones code. */
static void limit_lengths(int counts[258]) {
    for (int i = 257; i > 16; i--) {
        while (counts[i] > 0) {
            int j = i - 2;
            while (counts[j] == 0) j--;
            counts[i] -= 2;
            counts[i - 1]++;
            counts[j + 1] += 2;
            counts[j]--;
        }
    }
    int longest = 16;
    while (longest > 0 && counts[longest] == 0) longest--;
    counts[longest]--;
}

static void assign_codes(pcr_encoder_table *table) {
    uint32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        for (int i = 0; i < table->counts[length]; i++, code++) {
            int symbol = table->symbols[index++];
            table->code[symbol] = (uint16_t)code;
            table->length[symbol] = (uint8_t)length;
        }
    }
}

void pcr_optimal_table(pcr_encoder_table *table, const uint32_t frequency[257]) {
    node nodes[257];
    int lengths[257] = {0}, counts[258] = {0}, count = 0;
    memset(table, 0, sizeof *table);
    for (int i = 0; i < 256; i++)
        if (frequency[i]) nodes[count++] = (node){frequency[i], -1, i};
    nodes[count++] = (node){1, -1, 256}; /* reserves one code, so that none is all ones */
    code_lengths(nodes, count, lengths);
    for (int i = 0; i < count; i++) counts[lengths[i]]++;
    counts[0] = 0;
    limit_lengths(counts);
    for (int length = 1; length <= 16; length++) table->counts[length] = (uint8_t)counts[length];
    /* Symbols in order of their lengths before shortening. */
    for (int length = 1; length <= 256; length++)
        for (int i = 0; i < count; i++)
            if (lengths[i] == length && nodes[i].symbol < 256)
                table->symbols[table->num_symbols++] = (uint8_t)nodes[i].symbol;
    assign_codes(table);
}

bool pcr_writer_reserve(pcr_writer *writer, size_t more) {
    if (writer->failed) return false;
    if (writer->size + more <= writer->capacity) return true;
    size_t capacity = writer->capacity + writer->capacity / 2 + more + 4096;
    uint8_t *data = realloc(writer->data, capacity);
    if (!data) {
        writer->failed = true;
        return false;
    }
    writer->data = data;
    writer->capacity = capacity;
    return true;
}

/* 0xFF is followed by a stuffed 0 (T.81 F.1.2.3). */
static inline void put_stuffed(pcr_writer *writer, uint8_t byte) {
    writer->data[writer->size++] = byte;
    if (byte == 0xFF) writer->data[writer->size++] = 0;
}

/* Writes the whole bytes among the pending bits. */
static inline void drain(pcr_writer *writer) {
    for (; writer->count >= 8; writer->count -= 8)
        put_stuffed(writer, (uint8_t)(writer->bits >> (writer->count - 8)));
}

/* Writes 32 pending bits. */
static inline void drain_word(pcr_writer *writer) {
    writer->count -= 32;
    uint32_t word = (uint32_t)(writer->bits >> writer->count);
    /* A byte of 0xFF is a zero byte of the complement. */
    bool stuffing = (~word - 0x01010101u) & word & 0x80808080u;
    if (stuffing) {
        for (int shift = 24; shift >= 0; shift -= 8) put_stuffed(writer, (uint8_t)(word >> shift));
        return;
    }
    uint8_t *to = writer->data + writer->size;
    to[0] = (uint8_t)(word >> 24), to[1] = (uint8_t)(word >> 16);
    to[2] = (uint8_t)(word >> 8), to[3] = (uint8_t)word;
    writer->size += 4;
}

static inline void write_bits(pcr_writer *writer, uint32_t value, int count) {
    writer->bits = writer->bits << count | value;
    writer->count += count;
}

void pcr_write_tokens(pcr_writer *to, const pcr_tokens *tokens,
                      const pcr_encoder_table tables[PCR_NUM_TABLES]) {
    uint32_t codes[PCR_NUM_TABLES + 1][256]; /* code << 8 | length; none for raw bits */
    to->bits = 0;
    to->count = 0;
    /* A token is at most 32 bits; each byte of them may need stuffing. */
    if (!pcr_writer_reserve(to, 8 * tokens->size + 16)) return;
    memset(codes[PCR_TOKEN_RAW], 0, sizeof codes[PCR_TOKEN_RAW]);
    for (int table = 0; table < PCR_NUM_TABLES; table++)
        for (int symbol = 0; symbol < 256; symbol++)
            codes[table][symbol] =
                (uint32_t)tables[table].code[symbol] << 8 | tables[table].length[symbol];
    pcr_writer local = *to, *writer = &local;
    for (size_t i = 0; i < tokens->size; i++) {
        uint32_t token = tokens->data[i], code = codes[token >> 5 & 7][token >> 8 & 255];
        write_bits(writer, code >> 8, (int)(code & 255));
        write_bits(writer, token >> 16, (int)(token & 31));
        if (writer->count >= 32) drain_word(writer);
    }
    drain(writer);
    if (writer->count) {
        int fill = 8 - writer->count;
        write_bits(writer, (1u << fill) - 1, fill); /* T.81 F.1.2.3: padded with ones */
        drain(writer);
    }
    *to = local;
}
