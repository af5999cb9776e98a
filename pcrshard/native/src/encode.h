/* The encoder of pcr_rescan: coefficients to tokens, tokens to optimal Huffman codes, codes to
 * bytes. rescan.c uses the kernel of tokens_body.h and encode.c, which share only these types. */
#ifndef PCR_ENCODE_H
#define PCR_ENCODE_H

#include "pcr_internal.h"

enum {
    PCR_DC_TABLES = 0,        /* tables 0 and 1 */
    PCR_AC_TABLES = 2,        /* tables 2 and 3 */
    PCR_NUM_TABLES = 4,
    PCR_TOKEN_RAW = 4,        /* table field of bits without a symbol */
    /* Limits for 8 bits per sample: T.81 tables F.1 and F.2. Whatever the script, more is damage,
     * and libjpeg could not write it as baseline. */
    PCR_MAX_AC = 1023,
    PCR_MAX_DC_DIFFERENCE = 2047,
    PCR_MAX_CORRECTIONS = 937 /* jcphuff.c's limit; the same one keeps the output the same */
};

/* value << 16 | symbol << 8 | table << 5 | number of value bits (0..16) */
struct pcr_tokens {
    uint32_t *data;
    size_t size, capacity;
    uint32_t frequency[PCR_NUM_TABLES][257];
    bool failed;   /* out of memory */
    bool overflow; /* a value above PCR_MAX_AC or PCR_MAX_DC_DIFFERENCE */
};

typedef struct {
    uint8_t *data;
    size_t size, capacity;
    uint64_t bits; /* the low `count` bits are still to be written */
    int count;
    bool failed;
} pcr_writer;

typedef struct {
    uint16_t code[256];
    uint8_t length[256];
    uint8_t counts[17], symbols[256];
    int num_symbols;
} pcr_encoder_table;

/* Which of two Huffman tables a component has, as libjpeg chooses it: 1 for Cb and Cr, else 0. */
static inline int pcr_table_of(const pcr_decoder *dec, int component) {
    bool chroma = component == 1 || component == 2;
    return chroma && (dec->color == PCR_COLOR_YCC || dec->color == PCR_COLOR_YCCK);
}

/* encode.c */
void pcr_optimal_table(pcr_encoder_table *table, const uint32_t frequency[257]);
bool pcr_writer_reserve(pcr_writer *writer, size_t more);
void pcr_write_tokens(pcr_writer *writer, const pcr_tokens *tokens,
                      const pcr_encoder_table tables[PCR_NUM_TABLES]);

#endif
