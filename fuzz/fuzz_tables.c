/* libFuzzer harness: what readers do with tables that anyone may have written. Places the pieces of
 * a prefix and checks their checksums, and applies a patch of weights.
 *
 * The first byte chooses. Besides what the sanitizers find, every piece must lie in its buffer, two
 * ways of summing it must agree, and a patch that is accepted must be the one that the encoder
 * writes for the same change, or undo it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "pcr.h"

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

/* Takes bytes from the front into memory of their own, so that reading past them is found. */
static void *take(const uint8_t **data, size_t *size, size_t count) {
    uint8_t *copy = calloc(count ? count : 1, 1);
    require(copy != NULL, "no memory");
    size_t have = count < *size ? count : *size;
    memcpy(copy, *data, have);
    *data += have, *size -= have;
    if (count) return copy;
    free(copy);
    return malloc(1);
}

static int inside(const pcr_piece *piece, const uint8_t *memory, size_t size) {
    return piece->data >= memory && piece->size <= size &&
        (size_t)(piece->data - memory) <= size - piece->size;
}

static void check_place(const uint8_t *data, size_t size) {
    uint8_t *shape = take(&data, &size, 4);
    size_t rows = 1 + shape[0] % 5, units = 1 + shape[1] % 7, count = rows * units;
    size_t base = shape[2] % (rows + 1), headers_size = shape[3];
    free(shape);
    uint32_t *sizes = take(&data, &size, 4 * count), *crcs = take(&data, &size, 4 * units);
    uint16_t *header_sizes = take(&data, &size, 2 * count);
    uint64_t *starts = take(&data, &size, 8 * rows), *offsets = take(&data, &size, 8 * units);
    uint8_t *headers = take(&data, &size, headers_size);
    size_t buffer_size = size;
    uint8_t *buffer = take(&data, &size, buffer_size);
    pcr_piece *pieces = malloc(2 * count * sizeof *pieces);
    uint8_t *damaged = malloc(units);
    require(pieces && damaged, "no memory");
    pcr_place place = {rows, units, base, starts, offsets, headers, headers_size, buffer,
                       buffer_size};
    if (pcr_place_pieces(&place, sizes, header_sizes, pieces)) {
        for (size_t i = 0; i < 2 * count; i++)
            require(i % 2 ? inside(&pieces[i], buffer, buffer_size)
                          : inside(&pieces[i], headers, headers_size),
                    "a piece is not in its memory");
        size_t found = pcr_check_pieces(pieces, 2 * rows, units, crcs, damaged), again = 0;
        for (size_t unit = 0; unit < units; unit++) {
            const pcr_piece *own = pieces + unit * 2 * rows;
            size_t total = 0;
            for (size_t i = 0; i < 2 * rows; i++) total += own[i].size;
            uint8_t *joined = malloc(total + 1);
            require(joined != NULL, "no memory");
            pcr_join_pieces(own, 2 * rows, joined);
            int differs = total && pcr_crc32c(0, joined, total) != crcs[unit];
            require(differs == damaged[unit], "a checksum depends on how bytes lie in pieces");
            again += (size_t)differs;
            free(joined);
        }
        require(found == again, "the number of damaged streams differs");
    }
    free(sizes), free(crcs), free(header_sizes), free(starts), free(offsets);
    free(headers), free(buffer), free(pieces), free(damaged);
}

static void check_patch(const uint8_t *data, size_t size) {
    uint8_t *shape = take(&data, &size, 4);
    int item_bytes = 1 << shape[0] % 3;
    size_t count = shape[1] | (size_t)(shape[0] & 8) << 6, gap_bytes = shape[2], bytes;
    free(shape);
    bytes = count * (size_t)item_bytes;
    uint8_t *was = take(&data, &size, bytes), *gaps = take(&data, &size, gap_bytes);
    size_t step_bytes = size;
    uint8_t *steps = take(&data, &size, step_bytes), *now = malloc(bytes + 1);
    require(now != NULL, "no memory");
    memcpy(now, was, bytes);
    int64_t crc = pcr_sparse_apply(now, count, item_bytes, gaps, gap_bytes, steps, step_bytes, 1);
    require(crc == -1 || crc == pcr_crc32c(0, now, bytes), "the checksum of a patched tensor");
    require(pcr_sparse_apply(now, count, 3, gaps, gap_bytes, steps, step_bytes, 0) == -1,
            "words of 3 bytes");
    /* The change as the encoder writes it leads to the same words. */
    size_t capacity = count * 5 + count / 255 + 16, used[2];
    uint8_t *own = malloc(2 * capacity), *again = malloc(bytes + 1), *copy = malloc(bytes + 1);
    require(own && again && copy, "no memory");
    memcpy(again, was, bytes), memcpy(copy, was, bytes);
    require(pcr_sparse_encode(now, copy, count, item_bytes, own, own + capacity, capacity, used,
                              0) == 0 && memcmp(copy, now, bytes) == 0,
            "a change does not fit");
    require(pcr_sparse_apply(again, count, item_bytes, own, used[0], own + capacity, used[1], 0) ==
                    0 && memcmp(again, now, bytes) == 0,
            "a change that is encoded leads elsewhere");
    free(was), free(gaps), free(steps), free(now), free(own), free(again), free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 8) return 0;
    if (data[0] & 1)
        check_place(data + 1, size - 1);
    else
        check_patch(data + 1, size - 1);
    return 0;
}
