/* Threads that decode the images of batches, one image at a time, the oldest batch first. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "pcr_internal.h"

typedef struct {
    pcr_pool *pool;
    pcr_decoder *decoder;
    pthread_t thread;
} worker;

struct pcr_pool {
    pthread_mutex_t lock; /* guards the fields below and the progress of batches */
    pthread_cond_t more, finished;
    pcr_batch *first, *last; /* batches with images that no thread has taken */
    bool stop;
    bool lent;       /* a waiting thread uses the decoder of a pool without threads */
    int num_threads; /* running */
    int num_workers; /* at least one: without threads, pcr_pool_wait uses its decoder */
    worker *workers;
    pid_t process; /* a forked child has none of the threads */
};

static bool is_done(const pcr_batch *batch) { return batch->done == batch->num_images; }

static int decode(pcr_decoder *decoder, const pcr_batch *batch, size_t image) {
    pcr_view views[PCR_MAX_VIEWS];
    size_t count = batch->num_views;
    int orientation = batch->orientations ? batch->orientations[image]
                                          : batch->views->request.orientation;
    int32_t *boxes = batch->boxes ? batch->boxes + 5 * image * count : NULL, height, width;
    int code = pcr_open(decoder, batch->pieces + image * batch->num_pieces, batch->num_pieces,
                        batch->views->request.max_pixels);
    if (!code) code = pcr_turned_size(decoder, orientation, &height, &width);
    if (code) return pcr_finish(decoder, code);
    if (batch->sizes) batch->sizes[2 * image] = height, batch->sizes[2 * image + 1] = width;
    if (batch->draws)
        pcr_draw_boxes(batch->states[image], height, width, batch->draws, count, boxes);
    for (size_t i = 0; i < count; i++) {
        pcr_view *view = &views[i];
        *view = batch->views[i];
        view->out += image * view->step;
        view->request.orientation = orientation;
        if (!boxes) continue;
        const int32_t *box = boxes + 5 * i;
        view->request.crop_y = box[0], view->request.crop_x = box[1];
        view->request.crop_h = box[2], view->request.crop_w = box[3];
        view->request.flip = box[4];
    }
    return pcr_decode_opened(decoder, views, count);
}

/* Takes an image of the oldest batch and decodes it; releases the lock while decoding. */
static void decode_next(pcr_pool *pool, pcr_decoder *decoder) {
    pcr_batch *batch = pool->first;
    size_t image = batch->order ? (size_t)batch->order[batch->taken] : batch->taken;
    batch->taken++;
    if (batch->taken == batch->num_images) pool->first = batch->following;
    pthread_mutex_unlock(&pool->lock);
    int code = decode(decoder, batch, image);
    pthread_mutex_lock(&pool->lock);
    batch->codes[image] = code;
    batch->done++;
    if (is_done(batch)) pthread_cond_broadcast(&pool->finished);
}

static void *work(void *argument) {
    const worker *me = argument;
    pcr_pool *pool = me->pool;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        if (pool->first)
            decode_next(pool, me->decoder);
        else
            pthread_cond_wait(&pool->more, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static bool make_workers(pcr_pool *pool, int backend) {
    pool->workers = calloc((size_t)pool->num_workers, sizeof *pool->workers);
    if (!pool->workers) return false;
    for (int i = 0; i < pool->num_workers; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].decoder = pcr_decoder_new(backend);
        if (!pool->workers[i].decoder) return false;
    }
    return true;
}

/* Block signals here so that the interpreter's threads receive them. */
static bool start_threads(pcr_pool *pool, int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->num_threads < count; pool->num_threads++) {
        worker *next = &pool->workers[pool->num_threads];
        if (pthread_create(&next->thread, NULL, work, next)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool->num_threads == count;
}

pcr_pool *pcr_pool_new(int num_threads, int backend) {
    pcr_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->process = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->num_workers = num_threads > 0 ? num_threads : 1;
    if (num_threads <= PCR_MAX_THREADS && make_workers(pool, backend) &&
        start_threads(pool, num_threads))
        return pool;
    pcr_pool_stop(pool);
    pcr_pool_free(pool);
    return NULL;
}

void pcr_pool_stop(pcr_pool *pool) {
    if (pool->process != getpid()) return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->more);
    pthread_cond_broadcast(&pool->finished);
    while (pool->lent) pthread_cond_wait(&pool->finished, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->num_threads; i++) pthread_join(pool->workers[i].thread, NULL);
}

void pcr_pool_free(pcr_pool *pool) {
    if (pool->process != getpid()) return;
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->more);
    pthread_mutex_destroy(&pool->lock);
    for (int i = 0; pool->workers && i < pool->num_workers; i++)
        pcr_decoder_free(pool->workers[i].decoder);
    free(pool->workers);
    free(pool);
}

/* What the threads rely on; requests are checked with each image. */
static bool is_sound(const pcr_batch *batch) {
    if (batch->num_views < 1 || batch->num_views > PCR_MAX_VIEWS || !batch->views) return false;
    if (batch->draws && !(batch->boxes && batch->states)) return false;
    if (batch->num_images && !(batch->pieces && batch->codes)) return false;
    for (size_t i = 0; batch->order && i < batch->num_images; i++)
        if (batch->order[i] < 0 || (size_t)batch->order[i] >= batch->num_images) return false;
    return true;
}

int pcr_pool_add(pcr_pool *pool, pcr_batch *batch) {
    batch->taken = batch->done = 0;
    batch->following = NULL;
    if (!is_sound(batch)) return PCR_USAGE;
    if (!batch->num_images) return PCR_OK;
    pthread_mutex_lock(&pool->lock);
    if (pool->first)
        pool->last->following = batch;
    else
        pool->first = batch;
    pool->last = batch;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return PCR_OK;
}

static struct timespec time_after(int milliseconds) {
    struct timespec when;
    timespec_get(&when, TIME_UTC);
    when.tv_sec += milliseconds / 1000;
    when.tv_nsec += milliseconds % 1000 * 1000000L;
    if (when.tv_nsec >= 1000000000L) when.tv_sec++, when.tv_nsec -= 1000000000L;
    return when;
}

int pcr_pool_wait(pcr_pool *pool, pcr_batch *batch, int milliseconds) {
    struct timespec end = time_after(milliseconds);
    pthread_mutex_lock(&pool->lock);
    bool in_time = true;
    while (!is_done(batch) && !pool->stop && in_time) {
        if (pool->num_threads || pool->lent || !pool->first) {
            in_time = pthread_cond_timedwait(&pool->finished, &pool->lock, &end) != ETIMEDOUT;
            continue;
        }
        pool->lent = true;
        decode_next(pool, pool->workers[0].decoder);
        pool->lent = false;
        pthread_cond_broadcast(&pool->finished);
    }
    int done = is_done(batch);
    pthread_mutex_unlock(&pool->lock);
    return done;
}
