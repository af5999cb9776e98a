/* The symbols of a scan: progressive (T.81 G.1.2), in the choices that libjpeg's jcphuff.c makes,
 * or sequential (T.81 F.1.2). */
#include <stdlib.h>

#include "encode.h"

/* Of a block: DC, 63 values with at most 3 runs of zeros among them, and the end. */
enum { MAX_BLOCK_TOKENS = 68 };
/* Coefficients 1 to 63 in a block's mask. */
#define ALL_AC (~UINT64_C(0) >> 1)

typedef struct {
    pcr_tokens *tokens;
    int table;
    uint32_t eob_run;
    int num_corrections; /* that belong to the pending end-of-band run */
    uint8_t corrections[1024];
} band_state;

int pcr_table_of(const pcr_decoder *dec, int component) {
    bool chroma = component == 1 || component == 2;
    return chroma && (dec->color == PCR_COLOR_YCC || dec->color == PCR_COLOR_YCCK);
}

static void reserve(pcr_tokens *tokens, size_t more) {
    if (PCR_LIKELY(tokens->size + more <= tokens->capacity) || tokens->failed) return;
    size_t capacity = 2 * tokens->capacity + more + 4096;
    uint32_t *data = realloc(tokens->data, capacity * sizeof *data);
    if (!data) {
        tokens->failed = true;
        tokens->size = 0;
        return;
    }
    tokens->data = data;
    tokens->capacity = capacity;
}

static inline void put(pcr_tokens *tokens, uint32_t value, int num_bits, int symbol, int table) {
    tokens->data[tokens->size++] = value << 16 | (uint32_t)symbol << 8 | (uint32_t)table << 5 |
        (uint32_t)num_bits;
    if (table != PCR_TOKEN_RAW) tokens->frequency[table][symbol]++;
}

static void put_bits(pcr_tokens *tokens, const uint8_t *bits, int count) {
    for (int i = 0; i < count; i += 16) {
        int n = pcr_min(16, count - i);
        uint32_t value = 0;
        for (int j = 0; j < n; j++) value = value << 1 | bits[i + j];
        put(tokens, value, n, 0, PCR_TOKEN_RAW);
    }
}

static inline int first_set(uint64_t mask) { return __builtin_clzll(mask); }

static inline int bit_length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

/* A signed value's category and bits, T.81 F.1.2.1. */
static inline void put_value(pcr_tokens *tokens, int32_t value, int run, int table) {
    int size = pcr_min(bit_length((uint32_t)abs(value)), 15);
    uint32_t bits = (uint32_t)(value < 0 ? value - 1 : value) & ((1u << size) - 1);
    put(tokens, bits, size, run << 4 | size, table);
}

static void flush_eob_run(band_state *state) {
    if (state->eob_run == 0) return;
    int size = bit_length(state->eob_run) - 1;
    put(state->tokens, state->eob_run & ((1u << size) - 1), size, size << 4, state->table);
    put_bits(state->tokens, state->corrections, state->num_corrections);
    state->eob_run = 0;
    state->num_corrections = 0;
}

static void dc_block(pcr_tokens *tokens, const pcr_scan_spec *spec, int dc, int32_t *pred,
                     int table) {
    int32_t value = dc >> spec->al; /* arithmetic shift: T.81 G.1.2.1 */
    if (spec->ah) {
        put(tokens, (uint32_t)value & 1, 1, 0, PCR_TOKEN_RAW);
        return;
    }
    if (PCR_UNLIKELY(abs(dc - *pred) > PCR_MAX_DC_DIFFERENCE)) tokens->overflow = true;
    put_value(tokens, value - (*pred >> spec->al), 0, table);
    *pred = dc;
}

/* Coefficients 1 to 63 of a sequential block. */
static void sequential_ac(pcr_tokens *tokens, const int16_t *block, uint64_t mask, int table) {
    int next = 1;
    for (; mask; mask &= ~(UINT64_C(1) << (63 - first_set(mask)))) {
        int k = first_set(mask);
        if (PCR_UNLIKELY(abs(block[k]) > PCR_MAX_AC)) tokens->overflow = true;
        for (; k - next > 15; next += 16) put(tokens, 0, 0, 0xF0, table);
        put_value(tokens, block[k], k - next, table);
        next = k + 1;
    }
    if (next <= 63) put(tokens, 0, 0, 0, table);
}

/* DC of one or several components, and in a sequential scan all else. Blocks beyond the image have
 * the DC of the block before them in the MCU, as libjpeg's transcoder does (jctrans.c). */
static void tokenise_mcus(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
    int32_t pred[PCR_MAX_COMPONENTS] = {0};
    const pcr_component *only = &dec->comp[spec->component[0]];
    bool alone = spec->num_components == 1;
    int rows = alone ? only->blocks_h : dec->mcus_h, cols = alone ? only->blocks_w : dec->mcus_w;
    for (int row = 0; row < rows && !tokens->failed; row++) {
        for (int col = 0; col < cols && !tokens->failed; col++) {
            reserve(tokens, PCR_MAX_MCU_BLOCKS * MAX_BLOCK_TOKENS);
            if (tokens->failed) return;
            for (int i = 0; i < spec->num_components; i++) {
                const pcr_component *comp = &dec->comp[spec->component[i]];
                int h = alone ? 1 : comp->h, v = alone ? 1 : comp->v, dc = 0;
                int table = pcr_table_of(dec, spec->component[i]);
                for (int b = 0; b < h * v; b++) {
                    int y = row * v + b / h, x = col * h + b % h;
                    bool inside = y < comp->blocks_h && x < comp->blocks_w;
                    size_t at = inside ? (size_t)y * (size_t)comp->stride + (size_t)x : 0;
                    if (inside) dc = comp->dc[at];
                    dc_block(tokens, spec, dc, &pred[i], PCR_DC_TABLES + table);
                    if (spec->se)
                        sequential_ac(tokens, comp->ac + 64 * at,
                                      inside ? comp->mask[at] & ALL_AC : 0, PCR_AC_TABLES + table);
                }
            }
        }
    }
}

static void ac_first_block(band_state *state, const pcr_scan_spec *spec, const int16_t *block,
                           uint64_t mask) {
    int next = spec->ss;
    for (; mask; mask &= ~(UINT64_C(1) << (63 - first_set(mask)))) {
        int k = first_set(mask), magnitude = abs(block[k]) >> spec->al;
        if (PCR_UNLIKELY(abs(block[k]) > PCR_MAX_AC)) state->tokens->overflow = true;
        if (magnitude == 0) continue;
        flush_eob_run(state);
        for (; k - next > 15; next += 16) put(state->tokens, 0, 0, 0xF0, state->table);
        put_value(state->tokens, block[k] < 0 ? -magnitude : magnitude, k - next, state->table);
        next = k + 1;
    }
    if (next <= spec->se && ++state->eob_run == 0x7FFF) flush_eob_run(state);
}

/* The last coefficient that becomes non-zero in this scan; -1 when none does. */
static int last_new(const pcr_scan_spec *spec, const int16_t *block, uint64_t mask) {
    for (; mask; mask &= mask - 1) {
        int k = 63 - __builtin_ctzll(mask);
        if (abs(block[k]) >> spec->al == 1) return k;
    }
    return -1;
}

static void ac_refine_block(band_state *state, const pcr_scan_spec *spec, const int16_t *block,
                            uint64_t mask) {
    pcr_tokens *tokens = state->tokens;
    int last = last_new(spec, block, mask), run = 0, previous = spec->ss - 1, num_pending = 0;
    uint8_t pending[64]; /* correction bits after the last symbol */
    for (; mask; mask &= ~(UINT64_C(1) << (63 - first_set(mask)))) {
        int k = first_set(mask), magnitude = abs(block[k]) >> spec->al;
        if (magnitude == 0) continue;
        run += k - previous - 1;
        previous = k;
        for (; run > 15 && k <= last; run -= 16) {
            flush_eob_run(state);
            put(tokens, 0, 0, 0xF0, state->table);
            put_bits(tokens, pending, num_pending);
            num_pending = 0;
        }
        if (magnitude > 1) {
            pending[num_pending++] = magnitude & 1;
            continue;
        }
        flush_eob_run(state);
        put(tokens, block[k] >= 0, 1, run << 4 | 1, state->table);
        put_bits(tokens, pending, num_pending);
        run = num_pending = 0;
    }
    if (previous == spec->se && run == 0 && num_pending == 0) return;
    memcpy(state->corrections + state->num_corrections, pending, (size_t)num_pending);
    state->num_corrections += num_pending;
    if (++state->eob_run == 0x7FFF || state->num_corrections > PCR_MAX_CORRECTIONS)
        flush_eob_run(state);
}

static void tokenise_ac(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
    const pcr_component *comp = &dec->comp[spec->component[0]];
    const uint64_t band = (~UINT64_C(0) >> spec->ss) & (~UINT64_C(0) << (63 - spec->se));
    int table = PCR_AC_TABLES + pcr_table_of(dec, spec->component[0]);
    band_state state = {.tokens = tokens, .table = table};
    for (int y = 0; y < comp->blocks_h; y++) {
        size_t first = (size_t)y * (size_t)comp->stride;
        for (size_t i = first; i < first + (size_t)comp->blocks_w; i++) {
            reserve(tokens, 256);
            if (tokens->failed) return;
            if (spec->ah)
                ac_refine_block(&state, spec, comp->ac + 64 * i, comp->mask[i] & band);
            else
                ac_first_block(&state, spec, comp->ac + 64 * i, comp->mask[i] & band);
        }
    }
    reserve(tokens, 256);
    if (!tokens->failed) flush_eob_run(&state);
}

void pcr_tokenise(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
    tokens->size = 0;
    memset(tokens->frequency, 0, sizeof tokens->frequency);
    if (spec->ss == 0)
        tokenise_mcus(dec, spec, tokens);
    else
        tokenise_ac(dec, spec, tokens);
}
