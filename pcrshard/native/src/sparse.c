/* Changed words between two versions of weights, as gaps and steps. */
#include <string.h>

#include "avx2.h"
#include "numbers.h"
#include "pcr.h"

/* Compiled twice, for any processor and for AVX2. */
#define INLINE static inline __attribute__((always_inline))

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* A word's place among all numbers, in order; without branches, for signs are hard to predict. */
#define TOP(type) ((type)((type)1 << (8 * sizeof(type) - 1)))
#define SIGN(type, stype, word) ((type)((stype)(word) >> (8 * sizeof(type) - 1)))
#define ORDERED(type, stype, word) ((type)((word) ^ (SIGN(type, stype, word) | TOP(type))))
#define UNORDERED(type, stype, place) \
    ((type)((place) ^ (SIGN(type, stype, (type)~(place)) | TOP(type))))

#define RUN 64
/* Bytes that are compared before their changes are encoded. */
#define STRIPE 2048
/* Bytes that are summed at once while the next ones are on their way from memory. */
#define SUMMED 8192
#define LINE 64
/* Words are fetched this many bytes early: most lines hold no changed word, which processors do not
 * take for a stream. */
#define AHEAD 2048

/* A bit for each of 64 bytes that differs. */
INLINE uint64_t difference(const void *a, const void *b) {
#if defined(__SSE2__)
    uint64_t equal = 0;
    for (int i = 0; i < 4; i++) {
        __m128i x = _mm_loadu_si128((const __m128i *)a + i);
        __m128i y = _mm_loadu_si128((const __m128i *)b + i);
        equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)) << (16 * i);
    }
    return ~equal;
#else
    uint64_t differs = 0;
    for (int i = 0; i < RUN; i++)
        differs |= (uint64_t)(((const uint8_t *)a)[i] != ((const uint8_t *)b)[i]) << i;
    return differs;
#endif
}

/* The same for fewer bytes than 64. */
INLINE uint64_t difference_of_rest(const uint8_t *a, const uint8_t *b, size_t size) {
    uint64_t differs = 0;
    for (size_t i = 0; i < size; i++) differs |= (uint64_t)(a[i] != b[i]) << i;
    return differs;
}

/* Writes where words of a stripe differ, in words from its start; returns how many do. From its
 * start on, left bytes can be read. places has room for each word and two more: writing two at a
 * time saves a branch that cannot be predicted. */
INLINE size_t find_changes(const uint8_t *now, const uint8_t *was, size_t size, size_t left,
                           size_t item_bytes, uint16_t *places) {
    const uint64_t first_bytes = item_bytes == 1   ? UINT64_MAX
                                 : item_bytes == 2 ? 0x5555555555555555
                                                   : 0x1111111111111111;
    size_t found = 0;
    for (size_t start = 0; start < size; start += RUN) {
        size_t ahead = left - start > AHEAD ? start + AHEAD : start;
        __builtin_prefetch(now + ahead);
        __builtin_prefetch(was + ahead, 1);
        uint64_t differs = size - start >= RUN
                               ? difference(now + start, was + start)
                               : difference_of_rest(now + start, was + start, size - start);
        for (size_t bytes = 1; bytes < item_bytes; bytes *= 2) differs |= differs >> bytes;
        differs &= first_bytes;
        size_t after = found + (size_t)__builtin_popcountll(differs);
        do {
            for (int i = 0; i < 2; i++) {
                size_t byte = start + (size_t)__builtin_ctzll(differs | (uint64_t)1 << 63);
                places[found++] = (uint16_t)(byte / item_bytes);
                differs &= differs - 1;
            }
        } while (found < after);
        found = after;
    }
    return found;
}

#define DEFINE(type, stype, suffix)                                                              \
    INLINE int64_t encode_##suffix(const type *now, type *was, size_t count, uint8_t *gaps,      \
                                   uint8_t *steps, size_t capacity, size_t *used, int with_crc) {\
        const size_t stripe = STRIPE / sizeof(type);                                             \
        uint8_t *gap = gaps, *step = steps;                                                      \
        uint8_t *gap_end = gaps + capacity, *step_end = steps + capacity;                        \
        uint16_t places[STRIPE + 2];                                                             \
        size_t next = 0;                                                                         \
        uint32_t crc = 0;                                                                        \
        for (size_t start = 0; start < count; start += stripe) {                                 \
            size_t words = count - start < stripe ? count - start : stripe;                      \
            size_t found =                                                                       \
                find_changes((const uint8_t *)(now + start), (const uint8_t *)(was + start),     \
                             words * sizeof(type), (count - start) * sizeof(type), sizeof(type), \
                             places);                                                            \
            for (size_t n = 0; n < found; n++) {                                                 \
                size_t i = start + places[n];                                                    \
                size_t distance = i - next;                                                      \
                if ((size_t)(gap_end - gap) < distance / 255 + 1 ||                              \
                    (size_t)(step_end - step) < 1 + sizeof(type))                                \
                    return -1;                                                                   \
                for (; distance >= 255; distance -= 255) *gap++ = 255;                           \
                *gap++ = (uint8_t)distance;                                                      \
                type to = ORDERED(type, stype, now[i]), from = ORDERED(type, stype, was[i]);     \
                type d = (type)(to - from);                                                      \
                type zigzag = (type)((type)(d << 1) ^ SIGN(type, stype, d));                     \
                if (zigzag < 255) {                                                              \
                    *step++ = (uint8_t)zigzag;                                                   \
                } else {                                                                         \
                    *step++ = 255;                                                               \
                    for (size_t byte = 0; byte < sizeof(type); byte++)                           \
                        *step++ = (uint8_t)(zigzag >> (8 * byte));                               \
                }                                                                                \
                was[i] = now[i];                                                                 \
                next = i + 1;                                                                    \
            }                                                                                    \
            if (with_crc)                                                                        \
                crc = pcr_crc32c(crc, (const uint8_t *)(was + start), words * sizeof(type));     \
        }                                                                                        \
        used[0] = (size_t)(gap - gaps);                                                          \
        used[1] = (size_t)(step - steps);                                                        \
        return crc;                                                                              \
    }                                                                                            \
    static int64_t apply_##suffix(type *words, size_t count, const uint8_t *gap,                 \
                                  size_t gap_bytes, const uint8_t *step, size_t step_bytes,      \
                                 int with_crc) {                                                \
        const uint8_t *gap_end = gap + gap_bytes, *step_end = step + step_bytes;                 \
        const size_t summed = SUMMED / sizeof(type);                                             \
        size_t i = 0, fetched = 0, start = 0;                                                    \
        uint32_t crc = 0;                                                                        \
        while (gap < gap_end) {                                                                  \
            size_t distance = 0;                                                                 \
            while (gap < gap_end && *gap == 255) {                                               \
                distance += 255;                                                                 \
                gap++;                                                                           \
            }                                                                                    \
            if (gap == gap_end || step == step_end) return -1;                                   \
            distance += *gap++;                                                                  \
            if (i >= count || distance >= count - i) return -1;                                  \
            i += distance;                                                                       \
            for (; fetched < count && fetched < i + AHEAD / sizeof(type);                        \
                 fetched += LINE / sizeof(type))                                                 \
                __builtin_prefetch(words + fetched, 1);                                          \
            for (; with_crc && i - start >= summed; start += summed)                             \
                crc = pcr_crc32c(crc, (const uint8_t *)(words + start), SUMMED);                 \
            type zigzag = *step++;                                                               \
            if (zigzag == 255) {                                                                 \
                if ((size_t)(step_end - step) < sizeof(type)) return -1;                         \
                zigzag = 0;                                                                      \
                for (size_t byte = 0; byte < sizeof(type); byte++)                               \
                    zigzag = (type)(zigzag | (type)((type)*step++ << (8 * byte)));               \
            }                                                                                    \
            type d = (type)((type)(zigzag >> 1) ^ (type)(0 - (zigzag & 1)));                     \
            type place = (type)(ORDERED(type, stype, words[i]) + d);                             \
            words[i] = UNORDERED(type, stype, place);                                            \
            i++;                                                                                 \
        }                                                                                        \
        if (with_crc)                                                                            \
            crc = pcr_crc32c(crc, (const uint8_t *)(words + start),                              \
                             (count - start) * sizeof(type));                                    \
        return step == step_end ? (int64_t)crc : -1;                                             \
    }

DEFINE(uint8_t, int8_t, u8)
DEFINE(uint16_t, int16_t, u16)
DEFINE(uint32_t, int32_t, u32)

#define ENCODE_PARAMETERS \
    const void *now, void *was, size_t count, int item_bytes, uint8_t *gaps, uint8_t *steps, \
        size_t capacity, size_t *used, int with_crc
#define ENCODE_ARGUMENTS now, was, count, item_bytes, gaps, steps, capacity, used, with_crc

INLINE int64_t encode(ENCODE_PARAMETERS) {
    if (item_bytes == 1) return encode_u8(now, was, count, gaps, steps, capacity, used, with_crc);
    if (item_bytes == 2) return encode_u16(now, was, count, gaps, steps, capacity, used, with_crc);
    if (item_bytes != 4) return -1;
    return encode_u32(now, was, count, gaps, steps, capacity, used, with_crc);
}

#if PCR_HAVE_VECTORS
PCR_AVX2_BEGIN
static int64_t encode_avx2(ENCODE_PARAMETERS) { return encode(ENCODE_ARGUMENTS); }
PCR_AVX2_END
#endif

int64_t pcr_sparse_encode(ENCODE_PARAMETERS) {
#if PCR_HAVE_VECTORS
    if (pcr_have_vectors()) return encode_avx2(ENCODE_ARGUMENTS);
#endif
    return encode(ENCODE_ARGUMENTS);
}

int64_t pcr_sparse_apply(void *words, size_t count, int item_bytes, const uint8_t *gaps,
                         size_t gap_bytes, const uint8_t *steps, size_t step_bytes,
                         int with_crc) {
    if (item_bytes == 1)
        return apply_u8(words, count, gaps, gap_bytes, steps, step_bytes, with_crc);
    if (item_bytes == 2)
        return apply_u16(words, count, gaps, gap_bytes, steps, step_bytes, with_crc);
    if (item_bytes != 4) return -1;
    return apply_u32(words, count, gaps, gap_bytes, steps, step_bytes, with_crc);
}
