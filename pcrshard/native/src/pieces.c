/* Streams that lie in pieces in a prefix: where the pieces are, their checksums, their bytes. */
#define _POSIX_C_SOURCE 200809L
#include "crc32c.h"

#include <pthread.h>

#include "pcr.h"

static uint32_t table[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) { pcr_crc32c_fill(table); }

/* Continues from the inverted register and returns it inverted. */
static uint32_t update(uint32_t crc, const uint8_t *data, size_t size) {
#if PCR_HAVE_VECTORS
    if (pcr_have_crc32c()) return pcr_crc32c_hardware(crc, data, size);
#endif
    return pcr_crc32c_portable(table, crc, data, size);
}

uint32_t pcr_crc32c(uint32_t crc, const uint8_t *data, size_t size) {
    pthread_once(&once, fill);
    return ~update(~crc, data, size);
}

int pcr_place_pieces(const pcr_place *place, const uint32_t *sizes, const uint16_t *header_sizes,
                     pcr_piece *pieces) {
    uint64_t header = 0;
    for (size_t row = 0; row < place->rows; row++) {
        uint64_t start = place->starts[row];
        pcr_piece *piece = pieces + 2 * row;
        for (size_t unit = 0; unit < place->units; unit++, piece += 2 * place->rows) {
            uint64_t size = *sizes++, length = *header_sizes++;
            if (length > size || length > place->headers_size - header) return 0;
            size -= length;
            if (row < place->base)
                start = row == 0 ? place->offsets[unit]
                                 : (uint64_t)(piece[-1].data - place->buffer) + piece[-1].size;
            if (start > place->buffer_size || size > place->buffer_size - start) return 0;
            piece[0] = (pcr_piece){place->headers + header, length};
            piece[1] = (pcr_piece){place->buffer + start, size};
            header += length;
            start += size;
        }
    }
    return 1;
}

size_t pcr_check_pieces(const pcr_piece *pieces, size_t num_pieces, size_t count,
                        const uint32_t *crcs, uint8_t *damaged) {
    size_t num_damaged = 0;
    pthread_once(&once, fill);
    for (size_t stream = 0; stream < count; stream++, pieces += num_pieces) {
        uint32_t crc = UINT32_MAX;
        size_t total = 0;
        for (size_t i = 0; i < num_pieces; i++) {
            crc = update(crc, pieces[i].data, pieces[i].size);
            total += pieces[i].size;
        }
        damaged[stream] = total > 0 && ~crc != crcs[stream];
        num_damaged += damaged[stream];
    }
    return num_damaged;
}

void pcr_join_pieces(const pcr_piece *pieces, size_t num_pieces, uint8_t *out) {
    for (size_t i = 0; i < num_pieces; i++) {
        if (pieces[i].size) memcpy(out, pieces[i].data, pieces[i].size);
        out += pieces[i].size;
    }
}

void pcr_atomic_add(int64_t *number, int64_t amount) {
    __atomic_fetch_add(number, amount, __ATOMIC_RELAXED);
}

int pcr_compare_exchange(int64_t *number, int64_t expected, int64_t desired) {
    return __atomic_compare_exchange_n(number, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}
