/* Huffman tables of T.81 Annex C, with a table that yields run, size and value in one look. */
#include "pcr_internal.h"

/* Fills the entries of one code of `length` bits starting at `base`, `room` entries wide. */
static void fill_code(uint32_t *base, int length, int symbol, bool is_dc, bool refines) {
    int room = 1 << (PCR_FAST_BITS - length);
    int run = is_dc ? 0 : symbol >> 4, size = symbol & 15;
    bool whole = length + size <= PCR_FAST_BITS && (is_dc || size > 0);
    if (!whole) {
        uint32_t entry = (uint32_t)symbol << 16 | PCR_SPECIAL | (uint32_t)length;
        for (int i = 0; i < room; i++) base[i] = entry;
        return;
    }
    int copies = room >> size;
    uint32_t step = (uint32_t)run + 1, bits_used = (uint32_t)(length + size);
    uint32_t low = refines ? bits_used << 8 | step : step << 8 | bits_used;
    for (int bits = 0; bits < 1 << size; bits++) {
        int value = size == 0 ? 0 : bits < 1 << (size - 1) ? bits - (1 << size) + 1 : bits;
        uint32_t entry = (uint32_t)value << 16 | low;
        for (int i = 0; i < copies; i++) *base++ = entry;
    }
}

int pcr_huffman_build(pcr_decoder *dec, pcr_huffman *table, bool is_dc, bool refines) {
    if (table->built && table->refines == refines) return PCR_OK;
    uint32_t code = 0;
    int index = 0;
    table->max_size = 0;
    for (int i = 0; i < 1 << PCR_FAST_BITS; i++) table->fast[i] = PCR_SPECIAL;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = index - (int32_t)code;
        for (int i = 0; i < table->counts[length]; i++, index++, code++) {
            int symbol = table->symbols[index];
            if (code >= 1u << length)
                return pcr_fail(dec, PCR_CORRUPT,
                                "expected Huffman code lengths that fit, got too many codes of %d "
                                "bits", length);
            if (is_dc && symbol > 15)
                return pcr_fail(dec, PCR_CORRUPT, "expected DC categories of at most 15, got %d",
                                symbol);
            table->max_size = pcr_max(table->max_size, symbol & 15);
            if (length <= PCR_FAST_BITS)
                fill_code(&table->fast[code << (PCR_FAST_BITS - length)], length, symbol, is_dc,
                          refines);
        }
        table->limit[length] = code << (16 - length);
    }
    table->built = true;
    table->refines = refines;
    return PCR_OK;
}
