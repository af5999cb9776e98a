/* CRC-32C (Castagnoli, RFC 3720 B.4), reflected. Each function continues from the inverted
 * register and returns it inverted. */
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
static inline uint32_t pcr_crc32c_portable(const uint32_t (*table)[256], uint32_t crc,
                                           const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
            (uint32_t)data[3] << 24;
        crc = table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255] ^
              table[4][crc >> 24] ^ table[3][data[4]] ^ table[2][data[5]] ^
              table[1][data[6]] ^ table[0][data[7]];
    }
    for (; size > 0; data++, size--) crc = crc >> 8 ^ table[0][(crc ^ *data) & 255];
    return crc;
}

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN

/* pcr_crc32c_shift: the CRC after appending zero bytes to its data; factor is
 * x^(8 * bytes - 33) modulo the polynomial, reflected. */
#if defined(__x86_64__)
static inline uint32_t pcr_crc32c_byte(uint32_t crc, uint8_t byte) {
    return _mm_crc32_u8(crc, byte);
}

static inline uint64_t pcr_crc32c_word(uint64_t crc, uint64_t word) {
    return _mm_crc32_u64(crc, word);
}

static inline uint64_t pcr_crc32c_shift(uint64_t crc, uint32_t factor) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                           _mm_cvtsi32_si128((int)factor), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}
#else
static inline uint32_t pcr_crc32c_byte(uint32_t crc, uint8_t byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}

static inline uint64_t pcr_crc32c_word(uint64_t crc, uint64_t word) {
    uint32_t out = (uint32_t)crc;
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(out) : "r"(word));
    return out;
}

static inline uint64_t pcr_crc32c_shift(uint64_t crc, uint32_t factor) {
    uint64x2_t product;
    __asm__(".arch_extension aes\n\tpmull %0.1q, %1.1d, %2.1d"
            : "=w"(product)
            : "w"(vdupq_n_u64(crc)), "w"(vdupq_n_u64(factor)));
    return pcr_crc32c_word(0, vgetq_lane_u64(product, 0));
}
#endif

static inline uint64_t pcr_crc32c_next(uint64_t crc, const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return pcr_crc32c_word(crc, word);
}

static inline uint32_t pcr_crc32c_serial(uint64_t crc, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) crc = pcr_crc32c_next(crc, data);
    for (; size > 0; data++, size--) crc = pcr_crc32c_byte((uint32_t)crc, *data);
    return (uint32_t)crc;
}

#if defined(__x86_64__)
PCR_AVX2_END

#define PCR_VPCLMUL __attribute__((target("avx2,pclmul,sse4.2,crc32,vpclmulqdq")))

/* Moves x in front of as many bytes as the factors stand for, and adds what is there already. Each
 * 128-bit lane is a polynomial: its first half is multiplied by x^(8 * bytes + 31), its second half
 * by x^(8 * bytes - 33), both modulo the polynomial, reflected. */
PCR_VPCLMUL static inline __m256i pcr_crc32c_fold(__m256i x, long long first, long long second,
                                                  __m256i next) {
    __m256i factors = _mm256_set_epi64x(second, first, second, first);
    __m256i moved = _mm256_xor_si256(_mm256_clmulepi64_epi128(x, factors, 0x00),
                                     _mm256_clmulepi64_epi128(x, factors, 0x11));
    return _mm256_xor_si256(moved, next);
}

/* 128 bytes a step by carry-less multiplication (Gopal et al., "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", 2009), twice as fast as the CRC instruction; on
 * processors with VPCLMULQDQ. */
PCR_VPCLMUL static inline uint32_t pcr_crc32c_wide(uint32_t crc, const uint8_t *data, size_t size) {
    __m256i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm256_loadu_si256((const __m256i *)data + i);
    x[0] = _mm256_xor_si256(x[0], _mm256_set_epi64x(0, 0, 0, crc));
    for (data += 128, size -= 128; size >= 128; data += 128, size -= 128)
        for (int i = 0; i < 4; i++)
            x[i] = pcr_crc32c_fold(x[i], 0x6992CEA2, 0x0D3B6092,
                                   _mm256_loadu_si256((const __m256i *)data + i));
    x[2] = pcr_crc32c_fold(x[0], 0x740EEF02, 0x9E4ADDF8, x[2]);
    x[3] = pcr_crc32c_fold(x[1], 0x740EEF02, 0x9E4ADDF8, x[3]);
    x[3] = pcr_crc32c_fold(x[2], 0x3DA6D0CB, 0xBA4FC28E, x[3]);
    x[3] = pcr_crc32c_fold(x[3], 0xF20C0DFE, 0x493C7D27, _mm256_permute4x64_epi64(x[3], 0xEE));
    __m128i last = _mm256_castsi256_si128(x[3]);
    uint64_t folded = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(last));
    folded = _mm_crc32_u64(folded, (uint64_t)_mm_extract_epi64(last, 1));
    return pcr_crc32c_serial(folded, data, size);
}

PCR_AVX2_BEGIN
#endif

/* Three runs at a time, because the instruction takes three cycles (Gopal et al., "Fast CRC
 * Computation for iSCSI Polynomial Using CRC32 Instruction", 2011). */
static inline uint32_t pcr_crc32c_hardware(uint32_t crc, const uint8_t *data, size_t size) {
    enum { RUN = 256 };
    uint64_t wide = crc;
#if defined(__x86_64__)
    if (size >= 512 && pcr_processor() & PCR_VPCLMULQDQ)
        return pcr_crc32c_wide(crc, data, size);
#endif
    for (; size >= 3 * RUN; data += 3 * RUN, size -= 3 * RUN) {
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < RUN; i += 8) {
            wide = pcr_crc32c_next(wide, data + i);
            second = pcr_crc32c_next(second, data + RUN + i);
            third = pcr_crc32c_next(third, data + 2 * RUN + i);
        }
        wide = pcr_crc32c_shift(wide, UINT32_C(0xDD7E3B0C)) ^
            pcr_crc32c_shift(second, UINT32_C(0xB9E02B86)) ^ third;
    }
    return pcr_crc32c_serial(wide, data, size);
}

PCR_AVX2_END
#endif

#endif
