/* pcrshard's native core: error-bounded codes of floats, and deltas of words.
 *
 * No globals, and no state between calls.
 */
#ifndef PCR_NUMBERS_H
#define PCR_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

enum { PCR_FLOAT32 = 0, PCR_BFLOAT16 = 1 };

/* Calls a function on several threads and waits for them, like GOMP_parallel. */
typedef void (*pcr_parallel)(void (*call)(void *), void *data, unsigned threads, unsigned flags);

/* A line for each row of values (row r has number r % period), or with period 0 for each column;
 * is_relu: negative results become 0. */
typedef struct {
    const float *gains, *offsets;
    size_t period;
    int is_relu;
} pcr_affine;

/* The error-bounded quantizer. With d = gain x + offset (d = x without affine), codes are 0 where d
 * is 0, else sign(d) * ceil(|d| / (2 step)), or -128 if that is above 126 or x is not finite;
 * returns how many are -128. If range is not NULL, values equal to its lower and upper end, unless
 * that is 0, have the codes -127 and 127. Value i is at i / run * stride + i % run. type:
 * PCR_FLOAT32 or PCR_BFLOAT16. step: normal and positive. backend: PCR_BACKEND_*. If parallel is
 * NULL, this thread does all the work. */
size_t pcr_quantize(const void *values, size_t count, size_t run, size_t stride, int type,
                    float step, const float *range, const pcr_affine *affine, int8_t *codes,
                    int backend, pcr_parallel parallel, unsigned threads);
/* The least and the largest finite value; INFINITY and -INFINITY if there is none. Returns 1 if
 * memory is short. */
int pcr_range(const void *values, size_t count, size_t run, size_t stride, int type, float *range,
              int backend, pcr_parallel parallel, unsigned threads);
/* The standard deviation of the finite values, laid out as in pcr_quantize, limited to guard times
 * the median magnitude of the nonzero ones. Above 65,536 values, samples 512 to 1,023 runs of 64.
 * NaN if no value is finite, or if memory is short. */
double pcr_deviation(const void *values, size_t count, size_t run, size_t stride, int type,
                     double guard);
/* table[code + 128] * gain + offset, without affine table[code + 128], as values of a type; rows
 * have `run` values. */
void pcr_restore(const int8_t *codes, size_t count, size_t run, const float *table,
                 const pcr_affine *affine, int type, void *values, pcr_parallel parallel,
                 unsigned threads);

/* Changed words between two versions of weights, as gaps and steps. A gap is the number of equal
 * words before a changed one, in bytes of which 255 continues. A step is the number of
 * representable values between the two words, zigzag: one byte, or 255 and item_bytes bytes.
 * Makes was equal to now; returns its CRC-32C (0 without with_crc), or -1 if a buffer is full (was
 * then equals now in part). item_bytes: 1, 2 or 4. used: bytes written to gaps and to steps. */
int64_t pcr_sparse_encode(const void *now, void *was, size_t count, int item_bytes, uint8_t *gaps,
                          uint8_t *steps, size_t capacity, size_t *used, int with_crc);
/* Applies the steps. Returns the CRC-32C of all words (0 without with_crc), or -1 if the bytes end
 * early, are too many, or lead beyond the words; some words may then have changed. */
int64_t pcr_sparse_apply(void *words, size_t count, int item_bytes, const uint8_t *gaps,
                         size_t gap_bytes, const uint8_t *steps, size_t step_bytes,
                         int with_crc);

/* The codes of float32 values on a lattice of a step, and the words that they restore to. Returns
 * whether a value exceeds the bound, is subnormal, -0.0 or not finite, or has a code above 2^30;
 * the output is then meaningless. */
int pcr_quantize_linear(const uint32_t *words, size_t count, double step, double error_bound,
                        int32_t *codes, uint32_t *restored);

/* Adds the number, the sum, and the sum of the squares of finite values, minus a center, to three
 * sums. */
void pcr_add_moments(const double *values, size_t count, double center, double *sums);

/* Encodes values, at least one, as a pcodec file. out has room for pcr_pcodec_bound(count) bytes,
 * memory for pcr_pcodec_scratch(). Returns the size of the file, or 0 if the values of a chunk
 * range over more than 2^16; the output is then meaningless. */
size_t pcr_pcodec_encode(const int32_t *values, size_t count, uint8_t *out, void *memory);
size_t pcr_pcodec_bound(size_t count);
size_t pcr_pcodec_scratch(void);

#endif
