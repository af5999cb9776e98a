/* The symbols of a scan: progressive (T.81 G.1.2), in the choices that libjpeg's jcphuff.c makes,
 * or sequential (T.81 F.1.2); compiled once per instruction set.
 *
 * The including file defines PCR_NAME(x) and these primitives:
 *   pcr_find(block, mask, shift, keep)  those coefficients of the mask whose magnitude has a bit of
 *                                       `keep` set after a shift to the right
 *   pcr_extract(bits, mask)             the bits in the places of the mask, next to each other
 */
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
    int num_pending;     /* tokens of these */
    uint32_t pending[PCR_MAX_CORRECTIONS + 64];
} band_state;

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

static inline uint32_t raw_token(uint64_t bits, int count) {
    return (uint32_t)bits << 16 | PCR_TOKEN_RAW << 5 | (uint32_t)count;
}

/* The low `count` bits as tokens of 16 at most; returns how many. */
static inline int split_bits(uint32_t *to, uint64_t bits, int count) {
    int size = 0;
    for (; count > 16; count -= 16) to[size++] = raw_token(bits >> (count - 16), 16);
    if (count) to[size++] = raw_token(bits & ((1u << count) - 1), count);
    return size;
}

static inline void put_bits(pcr_tokens *tokens, uint64_t bits, int count) {
    tokens->size += (size_t)split_bits(tokens->data + tokens->size, bits, count);
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
    int size = bit_length(state->eob_run) - 1;
    put(state->tokens, state->eob_run & ((1u << size) - 1), size, size << 4, state->table);
    reserve(state->tokens, (size_t)state->num_pending + 256);
    if (state->tokens->failed) return;
    memcpy(state->tokens->data + state->tokens->size, state->pending,
           (size_t)state->num_pending * sizeof *state->pending);
    state->tokens->size += (size_t)state->num_pending;
    state->eob_run = 0;
    state->num_corrections = state->num_pending = 0;
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
static void tokenize_mcus(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
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

static inline uint64_t bit_of(int k) { return UINT64_C(1) << (63 - k); }

/* Coefficients from k on, k in 0..64. */
static inline uint64_t from(int k) { return k > 63 ? 0 : ~UINT64_C(0) >> k; }

/* mask: the nonzero coefficients of the band. */
static void ac_first_block(band_state *state, const pcr_scan_spec *spec, const int16_t *block,
                           uint64_t mask) {
    int next = spec->ss;
    if (PCR_UNLIKELY(spec->al > 9) && pcr_find(block, mask, 10, -1)) state->tokens->overflow = true;
    if (spec->al) mask = pcr_find(block, mask, spec->al, -1);
    if (mask && state->eob_run) flush_eob_run(state);
    for (; mask; mask &= ~bit_of(next - 1)) {
        int k = first_set(mask), value = block[k], magnitude = abs(value) >> spec->al;
        if (PCR_UNLIKELY(abs(value) > PCR_MAX_AC)) state->tokens->overflow = true;
        for (; PCR_UNLIKELY(k - next > 15); next += 16)
            put(state->tokens, 0, 0, 0xF0, state->table);
        put_value(state->tokens, value < 0 ? -magnitude : magnitude, k - next, state->table);
        next = k + 1;
    }
    if (next <= spec->se && ++state->eob_run == 0x7FFF) flush_eob_run(state);
}

/* Correction bits are taken from bit planes: `ones` are the coefficients whose bit of this scan is
 * set; of these, the ones not in `old` are new. */
static void ac_refine_block(band_state *state, const pcr_scan_spec *spec, const int16_t *block,
                            uint64_t mask) {
    pcr_tokens *tokens = state->tokens;
    const uint64_t old = pcr_find(block, mask, spec->al + 1, -1);
    const uint64_t ones = pcr_find(block, mask, spec->al, 1);
    uint64_t ahead = from(spec->ss), passed;
    int next = spec->ss;
    if (ones & ~old && state->eob_run) flush_eob_run(state);
    for (uint64_t left = ones & ~old; left; left &= ~bit_of(next - 1)) {
        int k = first_set(left), run;
        for (;;) {
            uint64_t zeros = ahead & ~old & ~from(k);
            run = __builtin_popcountll(zeros);
            if (PCR_LIKELY(run < 16)) break;
            /* To the 16th zero, before which the corrections of a run of 16 end. */
            for (int i = 0; i < 15; i++) zeros &= ~bit_of(first_set(zeros));
            passed = old & ahead & ~from(first_set(zeros));
            ahead = from(first_set(zeros) + 1);
            put(tokens, 0, 0, 0xF0, state->table);
            put_bits(tokens, pcr_extract(ones, passed), __builtin_popcountll(passed));
        }
        passed = old & ahead & ~from(k);
        int count = __builtin_popcountll(passed);
        uint64_t bits = pcr_extract(ones, passed) | (uint64_t)(block[k] >= 0) << count;
        /* A token has 16 bits. */
        if (PCR_LIKELY(count < 16)) {
            put(tokens, (uint32_t)bits, count + 1, run << 4 | 1, state->table);
        } else {
            put(tokens, 0, 0, run << 4 | 1, state->table);
            put_bits(tokens, bits, count + 1);
        }
        next = k + 1;
        ahead = from(next);
    }
    if (next > spec->se) return;
    passed = old & ahead;
    int count = __builtin_popcountll(passed);
    state->num_pending += split_bits(state->pending + state->num_pending,
                                     pcr_extract(ones, passed), count);
    state->num_corrections += count;
    if (++state->eob_run == 0x7FFF || state->num_corrections > PCR_MAX_CORRECTIONS)
        flush_eob_run(state);
}

static void tokenize_ac(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
    const pcr_component *comp = &dec->comp[spec->component[0]];
    const uint64_t band = from(spec->ss) & ~from(spec->se + 1);
    band_state state = {.tokens = tokens,
                        .table = PCR_AC_TABLES + pcr_table_of(dec, spec->component[0])};
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
    if (!tokens->failed && state.eob_run) flush_eob_run(&state);
}

static void PCR_NAME(tokenize)(pcr_decoder *dec, const pcr_scan_spec *spec, pcr_tokens *tokens) {
    tokens->size = 0;
    memset(tokens->frequency, 0, sizeof tokens->frequency);
    if (spec->ss == 0)
        tokenize_mcus(dec, spec, tokens);
    else
        tokenize_ac(dec, spec, tokens);
}
