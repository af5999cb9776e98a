/* Entropy decoding of spans of blocks (T.81 F.2 and G.2), compiled once per instruction set.
 *
 * The including file defines PCR_NAME(x) and these primitives (entropy_plain.h: all but the last):
 *   pcr_zeros, pcr_walk_zeros(zeros)     iterates over the zeros of a band
 *   pcr_next_zero(&walk, step)           the step-th zero from here, as a bit; 0 if there is none
 *   pcr_correct(block, bits, old, step)  moves those coefficients of `old` away from zero whose bit
 *                                        is set; the lowest bit belongs to the last coefficient
 *   pcr_clear(block)
 * A span never crosses a block row or a restart. Each function returns PCR_OK or PCR_CORRUPT;
 * running past the end is for the caller to notice.
 */
#include "bits.h"

static inline uint64_t top_bit(int k) { return UINT64_C(1) << (63 - k); }

/* Bits of the coefficients ss..se. */
static inline uint64_t band_mask(int ss, int se) {
    return (~UINT64_C(0) >> ss) & (~UINT64_C(0) << (63 - se));
}

_Static_assert(3 * PCR_FAST_BITS + 16 <= 56, "read_ac refills too seldom");
_Static_assert(PCR_FAST_BITS + 20 <= 32, "read_refinement refills too seldom");

static inline int leading_zeros(uint64_t x) { return __builtin_clzll(x); }

/* Reads a DC difference (T.81 F.2.2.1) after a refill; false when no code matches. */
static inline bool read_dc(pcr_bits *bits, const pcr_huffman *table, int32_t *difference) {
    uint32_t entry = table->fast[bits->bits >> (64 - PCR_FAST_BITS)];
    if (PCR_LIKELY(!(entry & PCR_SPECIAL))) {
        pcr_consume_entry(bits, entry);
        *difference = PCR_ENTRY_VALUE(entry);
        return true;
    }
    int size = pcr_special_symbol(bits, table, entry);
    if (size < 0) return false;
    *difference = size ? pcr_take_signed(bits, (uint32_t)size) : 0;
    return true;
}

/* The differences of one scan may not leave 16 bits: everything that follows is 16 bits wide. */
static inline bool add_dc(int32_t *pred, int32_t difference) {
    *pred += difference;
    return *pred == (int16_t)*pred;
}

enum { BLOCK_BAD = -1, BLOCK_FULL = -2 };

/* AC coefficients of a block after k, up to se. Returns BLOCK_FULL when coefficient se was coded,
 * BLOCK_BAD, or the r of the EOBr symbol that ended the block (with its extra bits still to
 * read). */
static inline int read_ac(pcr_bits *bits, const pcr_huffman *table, int k, int se, int al,
                          int16_t *block, uint64_t *mask) {
    uint64_t found = 0;
    int result;
    for (;;) {
        uint32_t entry;
        pcr_refill(bits);
        /* 56 bits last for 3 entries and a code of up to 16 bits. */
        for (int i = 0; i < 4; i++) {
            entry = table->fast[bits->bits >> (64 - PCR_FAST_BITS)];
            if (PCR_UNLIKELY(entry & PCR_SPECIAL)) goto special;
            pcr_consume_entry(bits, entry);
            k += (int)PCR_ENTRY_STEP(entry);
            if (PCR_UNLIKELY(k >= se)) {
                if (k > se) return BLOCK_BAD;
                block[k] = (int16_t)((uint32_t)PCR_ENTRY_VALUE(entry) << al);
                found |= top_bit(k);
                result = BLOCK_FULL;
                goto done;
            }
            block[k] = (int16_t)((uint32_t)PCR_ENTRY_VALUE(entry) << al);
            found |= top_bit(k);
        }
        continue;
    special:;
        int symbol = pcr_special_symbol(bits, table, entry);
        if (symbol < 0) return BLOCK_BAD;
        int run = symbol >> 4, size = symbol & 15;
        if (symbol == 0) {
            result = 0;
            goto done;
        }
        pcr_refill(bits);
        if (size == 0 && run < 15) {
            result = run;
            goto done;
        }
        k += run + 1;
        if (k > se) return BLOCK_BAD;
        if (size) {
            block[k] = (int16_t)((uint32_t)pcr_take_signed(bits, (uint32_t)size) << al);
            found |= top_bit(k);
        }
        if (k == se) {
            result = BLOCK_FULL;
            goto done;
        }
    }
done:
    *mask |= found;
    return result;
}

/* One block of a sequential scan (T.81 F.2.2). */
static inline bool read_block(pcr_bits *bits, pcr_scan *scan, int c, size_t index) {
    pcr_component *comp = scan->comp[c];
    int16_t *block = comp->ac + 64 * index;
    uint64_t mask = 0;
    int32_t difference;
    pcr_refill(bits);
    if (!read_dc(bits, scan->dc[c], &difference) || !add_dc(&scan->pred[c], difference))
        return false;
    comp->dc[index] = (int16_t)scan->pred[c];
    pcr_clear(block);
    int end = read_ac(bits, scan->ac[c], 0, 63, 0, block, &mask);
    comp->mask[index] = mask;
    return end == 0 || end == BLOCK_FULL; /* only EOB0 exists here */
}

static int PCR_NAME(sequential)(pcr_scan *scan, int row, int col, int count) {
    pcr_bits bits = scan->bits;
    size_t base[PCR_MAX_COMPONENTS];
    for (int c = 0; c < scan->num_components; c++)
        base[c] = (size_t)(row * scan->v[c] % scan->comp[c]->rows) * (size_t)scan->comp[c]->stride;
    for (int mcu = col; mcu < col + count; mcu++) {
        for (int c = 0; c < scan->num_components; c++) {
            int h = scan->h[c], v = scan->v[c];
            size_t index = base[c] + (size_t)mcu * (size_t)h;
            for (int y = 0; y < v; y++, index += (size_t)scan->comp[c]->stride)
                for (int x = 0; x < h; x++)
                    if (PCR_UNLIKELY(!read_block(&bits, scan, c, index + (size_t)x)))
                        return PCR_CORRUPT;
        }
    }
    scan->bits = bits;
    return PCR_OK;
}

static int PCR_NAME(dc_first)(pcr_scan *scan, int row, int col, int count) {
    pcr_bits bits = scan->bits;
    for (int mcu = col; mcu < col + count; mcu++) {
        for (int c = 0; c < scan->num_components; c++) {
            pcr_component *comp = scan->comp[c];
            int h = scan->h[c], v = scan->v[c];
            int16_t *dc = comp->dc + (size_t)(row * v) * (size_t)comp->stride +
                (size_t)mcu * (size_t)h;
            for (int y = 0; y < v; y++, dc += comp->stride) {
                for (int x = 0; x < h; x++) {
                    int32_t difference;
                    pcr_refill(&bits);
                    if (!read_dc(&bits, scan->dc[c], &difference) ||
                        !add_dc(&scan->pred[c], difference))
                        return PCR_CORRUPT;
                    dc[x] = (int16_t)((uint32_t)scan->pred[c] << scan->al);
                }
            }
        }
    }
    scan->bits = bits;
    return PCR_OK;
}

static int PCR_NAME(dc_refine)(pcr_scan *scan, int row, int col, int count) {
    pcr_bits bits = scan->bits;
    for (int mcu = col; mcu < col + count; mcu++) {
        for (int c = 0; c < scan->num_components; c++) {
            pcr_component *comp = scan->comp[c];
            int h = scan->h[c], v = scan->v[c];
            int16_t *dc = comp->dc + (size_t)(row * v) * (size_t)comp->stride +
                (size_t)mcu * (size_t)h;
            pcr_refill(&bits);
            for (int y = 0; y < v; y++, dc += comp->stride)
                for (int x = 0; x < h; x++) dc[x] |= (int16_t)(pcr_take(&bits, 1) << scan->al);
        }
    }
    scan->bits = bits;
    return PCR_OK;
}

static int PCR_NAME(ac_first)(pcr_scan *scan, int row, int col, int count) {
    pcr_component *comp = scan->comp[0];
    size_t start = (size_t)row * (size_t)comp->stride + (size_t)col;
    uint64_t *mask = comp->mask + start;
    int16_t *block = comp->ac + 64 * start;
    pcr_bits bits = scan->bits;
    uint32_t eob_run = scan->eob_run;
    for (int i = 0; i < count; i++) {
        if (eob_run) {
            uint32_t skip = eob_run < (uint32_t)(count - i) ? eob_run : (uint32_t)(count - i);
            eob_run -= skip;
            i += (int)skip - 1;
            continue;
        }
        if (mask[i] == 0) pcr_clear(block + 64 * (size_t)i);
        int end = read_ac(&bits, scan->ac[0], scan->ss - 1, scan->se, scan->al,
                          block + 64 * (size_t)i, &mask[i]);
        if (end == BLOCK_BAD) return PCR_CORRUPT;
        if (end > 0) eob_run = (1u << end) - 1 + (uint32_t)pcr_take(&bits, (uint32_t)end);
    }
    scan->eob_run = eob_run;
    scan->bits = bits;
    return PCR_OK;
}

/* The next n correction bits, n in 0..63, after those already in `have`; 20 bits must be valid. */
static inline uint64_t take_corrections(pcr_bits *bits, uint64_t have, int n) {
    if (PCR_UNLIKELY(n > 20)) {
        pcr_refill(bits);
        if (n > 32) {
            have = have << 32 | pcr_take(bits, 32);
            n -= 32;
            pcr_refill(bits);
        }
    }
    return have << n | pcr_take(bits, (uint32_t)n);
}

/* Whether a refinement scan's new coefficients are 1 or -1 at their bit position, as T.81 G.1.2.3
 * demands. Looked at only for tables that have codes for others, which some encoders write. */
static bool all_unit(const int16_t *block, uint64_t found, int al) {
    for (; found; found &= found - 1) {
        int value = block[63 - __builtin_ctzll(found)];
        if (value != 1 << al && value != -(1 << al)) return false;
    }
    return true;
}

/* Coefficients after k, in 0..63. */
static inline uint64_t after(int k) { return ~UINT64_C(0) >> 1 >> k; }

/* New coefficients of a block in a refinement scan (T.81 G.1.2.3): places them, and collects the
 * correction bits that lie between them for `old`, the band's coefficients known before; *reached
 * is the last coefficient passed. Returns the same as read_ac.
 *
 * Of the coefficients passed on the way to the zero that r others precede, those that are not the r
 * zeros need a correction bit. All this is one chain of dependences per symbol, and so is left for
 * the ordinary one as soon as no known coefficient lies ahead. */
static inline int read_refinement(pcr_bits *bits, const pcr_huffman *table, uint64_t band,
                                  uint64_t old, int se, int al, int16_t *block, uint64_t *mask,
                                  uint64_t *corrections, int *reached) {
    pcr_zeros zeros = pcr_walk_zeros(band ^ old);
    uint64_t found = 0, taken = 0;
    int k = *reached, result = BLOCK_FULL;
    for (; old & after(k);) {
        /* Refilling is on the critical path: only when a code and 20 corrections might not be
         * there. */
        if (bits->count < 32) pcr_refill(bits);
        uint32_t entry = table->fast[bits->bits >> (64 - PCR_FAST_BITS)];
        int step = (int)PCR_ENTRY_STEP(entry), value = PCR_ENTRY_VALUE(entry);
        if (PCR_LIKELY(!(entry & PCR_SPECIAL))) {
            pcr_consume_entry(bits, entry);
        } else {
            int symbol = pcr_special_symbol(bits, table, entry);
            if (symbol < 0 || (symbol & 15) > 1) return BLOCK_BAD;
            step = (symbol >> 4) + 1;
            if ((symbol & 15) == 0 && step < 16) {
                result = step - 1;
                goto done;
            }
            pcr_refill(bits);
            value = symbol & 15 ? pcr_take_signed(bits, 1) : 0;
        }
        uint64_t place = pcr_next_zero(&zeros, step);
        if (PCR_UNLIKELY(!place)) return BLOCK_BAD;
        int position = leading_zeros(place);
        taken = take_corrections(bits, taken, position - (k + step));
        k = position;
        if (PCR_LIKELY(value)) {
            block[position] = (int16_t)((uint32_t)value << al);
            found |= place;
        }
    }
    if (k < se) result = read_ac(bits, table, k, se, al, block, &found);
done:
    if (PCR_UNLIKELY(table->max_size > 1) && !all_unit(block, found, al)) return BLOCK_BAD;
    *mask |= found;
    *corrections = taken;
    *reached = k;
    return result;
}

static int PCR_NAME(ac_refine)(pcr_scan *scan, int row, int col, int count) {
    pcr_component *comp = scan->comp[0];
    size_t start = (size_t)row * (size_t)comp->stride + (size_t)col;
    uint64_t *mask = comp->mask + start;
    int16_t *block = comp->ac + 64 * start;
    pcr_bits bits = scan->bits;
    uint32_t eob_run = scan->eob_run;
    const uint64_t band = band_mask(scan->ss, scan->se);
    const pcr_huffman *table = scan->ac[0];
    const int se = scan->se, al = scan->al;
    const int16_t step = (int16_t)(1 << al);
    for (int i = 0; i < count; i++, block += 64) {
        uint64_t old = mask[i] & band, corrections = 0;
        int k = scan->ss - 1;
        if (eob_run == 0) {
            if (mask[i] == 0) pcr_clear(block);
            int end = read_refinement(&bits, table, band, old, se, al, block, &mask[i],
                                      &corrections, &k);
            if (PCR_UNLIKELY(end == BLOCK_BAD)) return PCR_CORRUPT;
            if (end >= 0) eob_run = (1u << end) + (uint32_t)pcr_take(&bits, (uint32_t)end);
        }
        if (eob_run) {
            eob_run--;
            if (old == 0) continue;
            if (bits.count < 32) pcr_refill(&bits);
            corrections = take_corrections(&bits, corrections,
                                           __builtin_popcountll(old & after(k)));
        }
        if (corrections) pcr_correct(block, corrections, old, step);
    }
    scan->eob_run = eob_run;
    scan->bits = bits;
    return PCR_OK;
}
