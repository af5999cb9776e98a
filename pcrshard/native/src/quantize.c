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

static size_t quantize_run(const void *values, int type, size_t count, const pcr_coding *how,
                           int8_t *codes, int backend) {
#if PCR_HAVE_VECTORS
    if (use_vectors(backend)) return pcr_quantize_avx2(values, type, count, how, codes);
#else
    (void)backend;
#endif
    return pcr_quantize_portable(values, type, 0, count, how, codes);
}

/* Each thread takes a block of values at a time. */
enum { BLOCK = 1 << 17 };

typedef struct job {
    void (*work)(struct job *task, size_t start, size_t stop);
    size_t count, run, stride;
    void *values;
    int8_t *codes;
    const float *table;
    pcr_coding how;
    const pcr_affine *affine;
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

/* What a run of values from place `start` on has for gains and offsets. */
static const float one = 1, nothing = 0;
static pcr_coding coding_at(const job *task, size_t start) {
    pcr_coding how = task->how;
    const pcr_affine *affine = task->affine;
    size_t first = 0;
    how.across = affine && !affine->period;
    if (affine) first = affine->period ? start / task->run % affine->period : start % task->run;
    how.gains = affine ? affine->gains + first : &one;
    how.offsets = affine ? affine->offsets + first : &nothing;
    return how;
}

static size_t run_at(const job *task, size_t start, size_t stop) {
    size_t left = task->run - start % task->run;
    return left < stop - start ? left : stop - start;
}

static const void *place_of(const job *task, size_t start) {
    size_t size = task->type == PCR_BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    size_t place = start / task->run * task->stride + start % task->run;
    return (const char *)task->values + place * size;
}

static void quantize_block(job *task, size_t start, size_t stop) {
    size_t escapes = 0;
    for (size_t count; start < stop; start += count) {
        pcr_coding how = coding_at(task, start);
        count = run_at(task, start, stop);
        escapes += quantize_run(place_of(task, start), task->type, count, &how,
                                task->codes + start, task->backend);
    }
    atomic_fetch_add(&task->escapes, escapes);
}

size_t pcr_quantize(const void *values, size_t count, size_t run, size_t stride, int type,
                    float step, const float *range, const pcr_affine *affine, int8_t *codes,
                    int backend, pcr_parallel parallel, unsigned threads) {
    float low = range && range[0] != 0 ? range[0] : NAN;
    float high = range && range[1] != 0 ? range[1] : NAN;
    job task = {.work = quantize_block,
                .count = count,
                .run = run,
                .stride = stride,
                .values = (void *)values,
                .codes = codes,
                .how = {.scale = 1 / (2 * step), .low = low, .high = high},
                .affine = affine,
                .type = type,
                .backend = backend};
    in_blocks(&task, parallel, threads);
    return task.escapes;
}

static void range_of_run(const void *values, int type, size_t count, int finite_only, int backend,
                         float *range) {
    size_t first = 0;
#if PCR_HAVE_VECTORS
    if (use_vectors(backend) && !finite_only) first = pcr_range_avx2(values, type, count, range);
#else
    (void)backend;
#endif
    for (size_t i = first; i < count; i++) {
        float value = pcr_value_at(values, type, i);
        if (finite_only && !isfinite(value)) continue;
        range[0] = value < range[0] ? value : range[0];
        range[1] = value > range[1] ? value : range[1];
    }
}

/* The lowest and highest finite value of a block. */
static void range_block(job *task, size_t start, size_t stop) {
    float range[2] = {INFINITY, -INFINITY};
    size_t first = start, count;
    for (int finite_only = 0; finite_only < 2; finite_only++) {
        for (start = first; start < stop; start += count) {
            count = run_at(task, start, stop);
            range_of_run(place_of(task, start), task->type, count, finite_only, task->backend,
                         range);
        }
        if (range[0] > -INFINITY && range[1] < INFINITY) break;
        range[0] = INFINITY, range[1] = -INFINITY;
    }
    float *found = (float *)task->table + first / BLOCK * 2;
    found[0] = range[0], found[1] = range[1];
}

int pcr_range(const void *values, size_t count, size_t run, size_t stride, int type, float *range,
              int backend, pcr_parallel parallel, unsigned threads) {
    size_t blocks = count / BLOCK + 1;
    float *found = malloc(blocks * 2 * sizeof *found);
    if (!found) return 1;
    range[0] = INFINITY, range[1] = -INFINITY;
    for (size_t i = 0; i < blocks; i++) found[2 * i] = INFINITY, found[2 * i + 1] = -INFINITY;
    job task = {.work = range_block,
                .count = count,
                .run = run,
                .stride = stride,
                .values = (void *)values,
                .table = found,
                .type = type,
                .backend = backend};
    in_blocks(&task, parallel, threads);
    for (size_t i = 0; i < blocks; i++) {
        range[0] = fminf(range[0], found[2 * i]);
        range[1] = fmaxf(range[1], found[2 * i + 1]);
    }
    free(found);
    return 0;
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
        for (size_t i = 0; i < length; i++) end[i] = pcr_value_at(values, type, first + i);
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

static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void restore_block(job *task, size_t start, size_t stop) {
    const float *table = task->table + 128;
    float least = task->affine && task->affine->is_relu ? 0 : -INFINITY;
    for (size_t count; start < stop; start += count) {
        pcr_coding how = coding_at(task, start);
        count = run_at(task, start, stop);
        const int8_t *codes = task->codes + start;
        float *floats = (float *)task->values + start;
        uint16_t *halves = (uint16_t *)task->values + start;
        if (!task->affine && task->type == PCR_FLOAT32) {
            for (size_t i = 0; i < count; i++) floats[i] = table[codes[i]];
            continue;
        }
        for (size_t i = 0; i < count; i++) {
            size_t k = i * how.across;
            float value = table[codes[i]] * how.gains[k] + how.offsets[k];
            value = value < least ? least : value; /* keeps NaN */
            if (task->type == PCR_BFLOAT16)
                halves[i] = to_bfloat16(value);
            else
                floats[i] = value;
        }
    }
}

void pcr_restore(const int8_t *codes, size_t count, size_t run, const float *table,
                 const pcr_affine *affine, int type, void *values, pcr_parallel parallel,
                 unsigned threads) {
    job task = {.work = restore_block,
                .count = count,
                .run = run,
                .values = values,
                .codes = (int8_t *)codes,
                .table = table,
                .affine = affine,
                .type = type};
    in_blocks(&task, parallel, threads);
}
