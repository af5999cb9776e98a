/* The error-bounded quantizer: the choice of the kernels. */
#include "quantize.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "avx2.h"
#include "pcr.h"

#if PCR_HAVE_VECTORS
static int use_vectors(int backend) {
    return backend != PCR_BACKEND_PORTABLE && pcr_have_vectors();
}
#endif

static size_t quantize_run(const void *values, size_t first, size_t count, int type, float scale,
                           int8_t *codes, int backend) {
    const float *floats = (const float *)values + first;
    const uint16_t *halves = (const uint16_t *)values + first;
    int is_half = type == PCR_BFLOAT16;
#if PCR_HAVE_VECTORS
    if (use_vectors(backend))
        return is_half ? pcr_quantize_bf16_avx2(halves, count, scale, codes)
                       : pcr_quantize_f32_avx2(floats, count, scale, codes);
#else
    (void)backend;
#endif
    return is_half ? pcr_quantize_bf16_portable(halves, count, scale, codes)
                   : pcr_quantize_f32_portable(floats, count, scale, codes);
}

/* Each thread takes a block of values at a time. */
enum { BLOCK = 1 << 17 };

typedef struct job {
    void (*work)(struct job *task, size_t start, size_t stop);
    size_t count, run, stride;
    void *values;
    int8_t *codes;
    float step;
    int type, backend;
    atomic_size_t next, escapes;
} job;

static void take_blocks(void *data) {
    job *task = data;
    size_t start;
    while ((start = atomic_fetch_add(&task->next, BLOCK)) < task->count) {
        size_t left = task->count - start;
        task->work(task, start, start + (left < BLOCK ? left : BLOCK));
    }
}

static void in_blocks(job *task, pcr_parallel parallel, unsigned threads) {
    size_t blocks = task->count / BLOCK;
    if (threads > blocks) threads = (unsigned)blocks;
    if (parallel && threads > 1)
        parallel(take_blocks, task, threads, 0);
    else
        take_blocks(task);
}

static void quantize_block(job *task, size_t start, size_t stop) {
    size_t escapes = 0, run = task->run;
    float scale = 1 / (2 * task->step);
    while (start < stop) {
        size_t at = start % run;
        size_t count = run - at < stop - start ? run - at : stop - start;
        escapes += quantize_run(task->values, start / run * task->stride + at, count, task->type,
                                scale, task->codes + start, task->backend);
        start += count;
    }
    atomic_fetch_add(&task->escapes, escapes);
}

size_t pcr_quantize(const void *values, size_t count, size_t run, size_t stride, int type,
                    float step, int8_t *codes, int backend, pcr_parallel parallel,
                    unsigned threads) {
    job task = {.work = quantize_block,
                .count = count,
                .run = run,
                .stride = stride,
                .values = (void *)values,
                .codes = codes,
                .step = step,
                .type = type,
                .backend = backend};
    in_blocks(&task, parallel, threads);
    return task.escapes;
}

enum { RUN = 64, RUNS = 512, EVERY = 8 };

/* Copies a sample of the values; returns how many. The stride between runs is odd, because channels
 * often have sizes that are powers of two. */
static size_t take_sample(const void *values, size_t count, size_t run, size_t stride, int type,
                          float *sample) {
    size_t few = count <= 2 * RUN * RUNS, length = few ? run : RUN;
    size_t across = run / length, runs = count / run * across;
    size_t step = few ? 1 : runs / RUNS | 1;
    float *end = sample;
    for (size_t k = 0; k < runs; k += step, end += length) {
        size_t first = k / across * stride + k % across * length;
        if (type == PCR_BFLOAT16)
            for (size_t i = 0; i < length; i++)
                end[i] = pcr_from_bfloat16(((const uint16_t *)values)[first + i]);
        else
            memcpy(end, (const float *)values + first, length * sizeof *end);
    }
    return (size_t)(end - sample);
}

static size_t drop_nonfinite(float *values, size_t count) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (isfinite(values[i])) values[kept++] = values[i];
    return kept;
}

/* The median magnitude of every eighth value that is not 0; infinity if there is none. Floats that
 * are not negative are ordered as their bits are. */
static double median_magnitude(const float *values, size_t count) {
    uint32_t known = 0, bits;
    size_t rank = 0;
    for (size_t i = 0; i < count; i += EVERY) rank += values[i] != 0;
    if (!rank) return INFINITY;
    rank = (rank - 1) / 2;
    for (int shift = 24; shift >= 0; shift -= 8) {
        size_t counts[256] = {0}, digit = 0;
        for (size_t i = 0; i < count; i += EVERY) {
            float magnitude = fabsf(values[i]);
            memcpy(&bits, &magnitude, sizeof bits);
            bool is_candidate = shift == 24 || bits >> (shift + 8) == known;
            if (bits && is_candidate) counts[bits >> shift & 255]++;
        }
        while (rank >= counts[digit]) rank -= counts[digit++];
        known = known << 8 | (uint32_t)digit;
    }
    float median;
    memcpy(&median, &known, sizeof median);
    return median;
}

/* The mean of the differences from a center, or of their squares. Several sums in turn do not wait
 * for each other. */
static double mean_of(const float *values, size_t count, double center, int squares) {
    double sums[8] = {0};
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (size_t j = 0; j < 8; j++) {
            double off = values[i + j] - center;
            sums[j] += squares ? off * off : off;
        }
    for (; i < count; i++) {
        double off = values[i] - center;
        sums[0] += squares ? off * off : off;
    }
    for (size_t j = 1; j < 8; j++) sums[0] += sums[j];
    return sums[0] / (double)count;
}

double pcr_deviation(const void *values, size_t count, size_t run, size_t stride, int type,
                     double guard) {
    float *sample = malloc(2 * RUN * RUNS * sizeof *sample);
    size_t found = sample ? take_sample(values, count, run, stride, type, sample) : 0;
    double mean = mean_of(sample, found, 0, 0), deviation = NAN;
    if (found && !isfinite(mean)) {
        found = drop_nonfinite(sample, found);
        mean = mean_of(sample, found, 0, 0);
    }
    if (found) {
        deviation = sqrt(mean_of(sample, found, mean, 1));
        if (guard < INFINITY) deviation = fmin(deviation, guard * median_magnitude(sample, found));
    }
    free(sample);
    return deviation;
}

static void dequantize_block(job *task, size_t start, size_t stop) {
    const int8_t *codes = task->codes + start;
    float *values = (float *)task->values + start;
#if PCR_HAVE_VECTORS
    if (use_vectors(task->backend)) {
        pcr_dequantize_f32_avx2(codes, stop - start, task->step, values);
        return;
    }
#endif
    pcr_dequantize_f32_portable(codes, stop - start, task->step, values);
}

void pcr_dequantize(const int8_t *codes, size_t count, float step, float *values, int backend,
                    pcr_parallel parallel, unsigned threads) {
    job task = {.work = dequantize_block,
                .count = count,
                .values = values,
                .codes = (int8_t *)codes,
                .step = step,
                .backend = backend};
    in_blocks(&task, parallel, threads);
}

static uint8_t predicted(int parts, int most) {
    int code = (parts + 31) >> 5;
    return (uint8_t)(code < 0 ? 0 : code > most ? most : code);
}

static void shift_by_one(uint8_t *codes, const uint8_t *source, const uint8_t *table,
                         size_t count) {
    for (size_t i = 0; i < count; i++) codes[i] += table[source[i]];
}

void pcr_shift_codes(uint8_t *codes, const uint8_t *first, const uint8_t *second,
                     const int16_t *tables, size_t outer, size_t channels, size_t inner, int most,
                     int sign) {
    uint8_t factor = sign < 0 ? 255 : 1, of_one[256];
    for (size_t channel = 0; channel < channels; channel++) {
        const int16_t *table = tables + 256 * channel * (second ? 2 : 1);
        for (int code = 0; !second && code < 256; code++)
            of_one[code] = factor * predicted(table[code], most);
        for (size_t image = 0; image < outer; image++) {
            size_t place = (image * channels + channel) * inner;
            if (!second) {
                shift_by_one(codes + place, first + place, of_one, inner);
                continue;
            }
            for (size_t i = place; i < place + inner; i++)
                codes[i] += factor * predicted(table[first[i]] + table[256 + second[i]], most);
        }
    }
}
