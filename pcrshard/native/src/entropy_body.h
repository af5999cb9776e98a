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

/* Coefficients after k, in 0..63. */
static inline uint64_t after(int k) { return ~UINT64_C(0) >> 1 >> k; }

/* Bits of the coefficients ss..se. */
static inline uint64_t band_mask(int ss, int se) {
    return (~UINT64_C(0) >> ss) & (~UINT64_C(0) << (63 - se));
}

_Static_assert(3 * PCR_FAST_BITS + 16 <= 56, "read_ac refills too seldom");

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
            k += (int)PCR_ENTRY_HIGH(entry);
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

/* One of the blocks of an MCU. */
typedef struct {
    pcr_component *comp;
    size_t index, step; /* of the block; to that of the next MCU */
    int c;              /* the component's number in the scan */
} mcu_block;

/* The blocks of an MCU, in the order of the scan; returns how many. */
static int find_blocks(const pcr_scan *scan, int row, int col, mcu_block blocks[]) {
    int count = 0;
    for (int c = 0; c < scan->num_components; c++) {
        pcr_component *comp = scan->comp[c];
        int h = scan->h[c], v = scan->v[c];
        size_t index = (size_t)(row * v % comp->rows) * (size_t)comp->stride + (size_t)(col * h);
        for (int y = 0; y < v; y++, index += (size_t)comp->stride)
            for (int x = 0; x < h; x++)
                blocks[count++] = (mcu_block){comp, index + (size_t)x, (size_t)h, c};
    }
    return count;
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
    mcu_block blocks[PCR_MAX_MCU_BLOCKS];
    const int num_blocks = find_blocks(scan, row, col, blocks);
    pcr_bits bits = scan->bits;
    for (int mcu = 0; mcu < count; mcu++) {
        for (int i = 0; i < num_blocks; i++) {
            if (PCR_UNLIKELY(!read_block(&bits, scan, blocks[i].c, blocks[i].index)))
                return PCR_CORRUPT;
            blocks[i].index += blocks[i].step;
        }
    }
    scan->bits = bits;
    return PCR_OK;
}

static int PCR_NAME(dc_first)(pcr_scan *scan, int row, int col, int count) {
    mcu_block blocks[PCR_MAX_MCU_BLOCKS];
    const int num_blocks = find_blocks(scan, row, col, blocks);
    pcr_bits bits = scan->bits;
    for (int mcu = 0; mcu < count; mcu++) {
        for (int i = 0; i < num_blocks; i++) {
            mcu_block *block = &blocks[i];
            int32_t difference, *pred = &scan->pred[block->c];
            pcr_refill(&bits);
            if (!read_dc(&bits, scan->dc[block->c], &difference) || !add_dc(pred, difference))
                return PCR_CORRUPT;
            block->comp->dc[block->index] = (int16_t)((uint32_t)*pred << scan->al);
            block->index += block->step;
        }
    }
    scan->bits = bits;
    return PCR_OK;
}

/* One bit per block: as many MCUs at a time as one load has bits for. */
static int PCR_NAME(dc_refine)(pcr_scan *scan, int row, int col, int count) {
    mcu_block blocks[PCR_MAX_MCU_BLOCKS];
    const int num_blocks = find_blocks(scan, row, col, blocks), most = 57 / num_blocks;
    uint64_t at = pcr_tell(&scan->bits);
    for (; count > 0 && !pcr_past_end(&scan->bits, at); count -= most) {
        int mcus = pcr_min(most, count);
        uint64_t bits = pcr_window(&scan->bits, at);
        at += (uint64_t)(mcus * num_blocks);
        for (int i = 0; i < num_blocks; i++, bits <<= 1) {
            mcu_block *block = &blocks[i];
            int16_t *dc = block->comp->dc;
            for (int mcu = 0; mcu < mcus; mcu++, block->index += block->step)
                dc[block->index] |= (int16_t)(bits << (mcu * num_blocks) >> 63 << scan->al);
        }
    }
    pcr_seek(&scan->bits, at);
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

/* Whether a refinement scan's new coefficients are 1 or -1 at their bit position, as T.81 G.1.2.3
 * demands. Looked at only for tables that have codes for others, which some encoders write. */
static bool all_unit(const int16_t *block, uint64_t found, int al) {
    for (; found; found &= found - 1) {
        int value = block[63 - __builtin_ctzll(found)];
        if (value != 1 << al && value != -(1 << al)) return false;
    }
    return true;
}

/* The next n correction bits, n in 0..63, after those already in `have`. */
static inline uint64_t take_corrections(const pcr_bits *bits, uint64_t *at, uint64_t have, int n) {
    if (PCR_UNLIKELY(n > 32)) {
        have = have << 32 | pcr_window(bits, *at) >> 32;
        *at += 32;
        n -= 32;
    }
    have = have << n | pcr_window(bits, *at) >> 1 >> (63 - n);
    *at += (uint64_t)n;
    return have;
}

/* New coefficients of a block in a refinement scan (T.81 G.1.2.3), read from bit position *start
 * on: places them, and collects the correction bits that lie between them for `old`, the band's
 * coefficients known before; *reached is the last coefficient passed. Returns the same as read_ac.
 *
 * Of the coefficients passed on the way to the zero that r others precede, those that are not the r
 * zeros need a correction bit. From one symbol to the next, this is one chain of dependencies.
 * Refilling is kept out of it: `window` is loaded at a symbol's first bit while that symbol is
 * decoded from `code`, the rest of the window before. A test for when to refill would be
 * mispredicted too often. */
static inline int read_refinement(const pcr_bits *bits, uint64_t *start, const pcr_huffman *table,
                                  uint64_t band, uint64_t old, int se, int al, int16_t *block,
                                  uint64_t *mask, uint64_t *corrections, int *reached) {
    pcr_zeros zeros = pcr_walk_zeros(band ^ old);
    uint64_t found = 0, taken = 0, at = *start, code = pcr_window(bits, at);
    int k = *reached, result = BLOCK_FULL;
    do {
        uint32_t entry = table->fast[code >> (64 - PCR_FAST_BITS)];
        uint64_t window = pcr_window(bits, at);
        if (PCR_UNLIKELY(entry & PCR_SPECIAL)) {
            pcr_bits here = {.bits = code, .count = 64};
            int symbol = pcr_special_symbol(&here, table, entry);
            if (symbol < 0 || (symbol & 15) > 1) return BLOCK_BAD;
            if ((symbol & 15) == 0 && symbol < 0xF0) {
                at += 64 - here.count;
                result = symbol >> 4;
                break;
            }
            uint32_t value = symbol & 15 ? (uint32_t)pcr_take_signed(&here, 1) : 0;
            entry = value << 16 | (64 - here.count) << 8 | (uint32_t)((symbol >> 4) + 1);
        }
        uint64_t place = pcr_next_zero(&zeros, (int)(entry & 63));
        if (PCR_UNLIKELY(!place)) return BLOCK_BAD;
        int position = leading_zeros(place), passed = position - (k + (int)(entry & 63));
        int size = (int)PCR_ENTRY_HIGH(entry);
        k = position;
        /* A code of 16 bits and a sign must be left in `code`. */
        if (PCR_UNLIKELY(passed > 20)) {
            at += (uint64_t)size;
            taken = take_corrections(bits, &at, taken, passed);
            code = pcr_window(bits, at);
        } else {
            taken = taken << passed | window << size >> 1 >> (63 - passed);
            code = window << size << passed;
            at += (uint64_t)(size + passed);
        }
        if (PCR_LIKELY(PCR_ENTRY_VALUE(entry))) {
            block[position] = (int16_t)((uint32_t)PCR_ENTRY_VALUE(entry) << al);
            found |= place;
        }
    } while (k < se);
    if (PCR_UNLIKELY(table->max_size > 1) && !all_unit(block, found, al)) return BLOCK_BAD;
    *mask |= found;
    *corrections = taken;
    *reached = k;
    *start = at;
    return result;
}

static int PCR_NAME(ac_refine)(pcr_scan *scan, int row, int col, int count) {
    pcr_component *comp = scan->comp[0];
    size_t start = (size_t)row * (size_t)comp->stride + (size_t)col;
    uint64_t *mask = comp->mask + start;
    int16_t *block = comp->ac + 64 * start;
    const pcr_bits bits = scan->bits;
    uint64_t at = pcr_tell(&bits);
    uint32_t eob_run = scan->eob_run;
    const uint64_t band = band_mask(scan->ss, scan->se);
    const pcr_huffman *table = scan->ac[0];
    const int se = scan->se, al = scan->al;
    const int16_t step = (int16_t)(1 << al);
    for (int i = 0; i < count && !pcr_past_end(&bits, at); i++, block += 64) {
        uint64_t old = mask[i] & band, corrections = 0;
        int k = scan->ss - 1;
        if (eob_run == 0) {
            if (mask[i] == 0) pcr_clear(block);
            int end = read_refinement(&bits, &at, table, band, old, se, al, block, &mask[i],
                                      &corrections, &k);
            if (PCR_UNLIKELY(end == BLOCK_BAD)) return PCR_CORRUPT;
            if (end >= 0) {
                eob_run = (1u << end) + (uint32_t)(pcr_window(&bits, at) >> 1 >> (63 - end));
                at += (uint64_t)end;
            }
        }
        if (eob_run) {
            eob_run--;
            if (old == 0) continue;
            corrections = take_corrections(&bits, &at, corrections,
                                           __builtin_popcountll(old & after(k)));
        }
        if (corrections) pcr_correct(block, corrections, old, step);
    }
    scan->eob_run = eob_run;
    pcr_seek(&scan->bits, at);
    return PCR_OK;
}
