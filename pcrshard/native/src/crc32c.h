/* CRC-32C (Castagnoli, RFC 3720 B.4), reflected. Each function goes on from the inverted register and gives it back inverted. */
#ifndef PCR_CRC32C_H
#define PCR_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "avx2.h"

/* table[k][b] is byte b followed by k zero bytes. */
static inline void pcr_crc32c_fill(uint32_t table[8][256]) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82F63B78) : 0);
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = table[k - 1][byte];
            table[k][byte] = crc >> 8 ^ table[0][crc & 255];
        }
}

/* Eight bytes a step (Kounavis and Berry 2005). */
static inline uint32_t pcr_crc32c_portable(const uint32_t (*table)[256], uint32_t crc, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        crc = table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255] ^ table[4][crc >> 24] ^
              table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    }
    for (; size > 0; data++, size--) crc = crc >> 8 ^ table[0][(crc ^ *data) & 255];
    return crc;
}

#if PCR_HAVE_AVX2
PCR_AVX2_BEGIN

/* What a CRC becomes by so many zero bytes behind its data; factor is x^(8 * bytes - 33) modulo the polynomial, reflected. */
static inline uint64_t pcr_crc32c_shift(uint64_t crc, uint32_t factor) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc), _mm_cvtsi32_si128((int)factor), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

static inline uint64_t pcr_crc32c_word(uint64_t crc, const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return _mm_crc32_u64(crc, word);
}

/* Three runs at a time, because the instruction takes three cycles (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using
 * CRC32 Instruction", 2011). It is SSE4.2's, which no processor with AVX2 lacks. */
static inline uint32_t pcr_crc32c_avx2(const uint32_t (*table)[256], uint32_t crc, const uint8_t *data, size_t size) {
    enum { RUN = 256 };
    uint64_t wide = crc;
    (void)table;
    for (; size >= 3 * RUN; data += 3 * RUN, size -= 3 * RUN) {
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < RUN; i += 8) {
            wide = pcr_crc32c_word(wide, data + i);
            second = pcr_crc32c_word(second, data + RUN + i);
            third = pcr_crc32c_word(third, data + 2 * RUN + i);
        }
        wide = pcr_crc32c_shift(wide, UINT32_C(0xDD7E3B0C)) ^ pcr_crc32c_shift(second, UINT32_C(0xB9E02B86)) ^ third;
    }
    for (; size >= 8; data += 8, size -= 8) wide = pcr_crc32c_word(wide, data);
    for (; size > 0; data++, size--) wide = _mm_crc32_u8((uint32_t)wide, *data);
    return (uint32_t)wide;
}

PCR_AVX2_END
#endif

#endif
