/* pcrshard.native._scatter: a range of a file into many bytes objects, without a buffer in between.
 *
 * POSIX calls it a scattered read (readv). It is a module of its own because only CPython's interface makes bytes objects
 * that can be filled; everything else is in the core, which knows nothing of Python.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#define _GNU_SOURCE /* preadv */
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <sys/uio.h>

#include "src/crc32c.h"

enum {
    ENDED = -1,
    MAX_VECTORS = 512,     /* of the 1024 that Linux, the BSDs and macOS take */
    BATCH_BYTES = 1 << 18, /* read at a time, so that they are in the processor's cache when their checksums are made */
    GAP_BYTES = 4096,
    LEARNT_BYTES = 31 << 20
};

typedef uint32_t (*crc32c_fn)(const uint32_t (*)[256], uint32_t, const uint8_t *, size_t);

typedef struct {
    int64_t offset, size, item;
} piece;

typedef struct {
    size_t size;
    uint8_t *next, *checked; /* next: where the next piece goes; up to checked the checksum was made */
    uint32_t crc;
} item;

typedef struct {
    int fd;
    int64_t position, stop;
    const piece *pieces;
    Py_ssize_t num_pieces, done, checked; /* pieces that were asked for; of which the checksums were made */
    item *items;
    bool check;
    int first, last; /* vectors that are not filled yet */
    struct iovec vectors[MAX_VECTORS];
    uint8_t gap[GAP_BYTES]; /* what is between pieces: headers and padding of the tar */
} scatter;

static uint32_t crc_table[8][256]; /* written once, at import */
static crc32c_fn crc32c = pcr_crc32c_portable;

static void plan_batch(scatter *s) {
    int64_t at = s->position;
    s->first = s->last = 0;
    while (s->last < MAX_VECTORS && at < s->stop && at - s->position < BATCH_BYTES) {
        const piece *next = s->pieces + s->done;
        int64_t edge = s->done < s->num_pieces ? next->offset : s->stop;
        struct iovec *vector = s->vectors + s->last++;
        if (at < edge) {
            vector->iov_base = s->gap;
            vector->iov_len = (size_t)(edge - at < GAP_BYTES ? edge - at : GAP_BYTES);
        } else {
            vector->iov_base = s->items[next->item].next;
            vector->iov_len = (size_t)next->size;
            s->items[next->item].next += next->size;
            s->done++;
        }
        at += (int64_t)vector->iov_len;
    }
}

static void check_batch(scatter *s) {
    for (; s->checked < s->done; s->checked++) {
        const piece *done = s->pieces + s->checked;
        item *owner = s->items + done->item;
        if (s->check) owner->crc = crc32c((const uint32_t (*)[256])crc_table, owner->crc, owner->checked, (size_t)done->size);
        owner->checked += done->size;
    }
}

/* 0, ENDED where the file does, or errno; may be called again after EINTR. Needs no interpreter. */
static int run(scatter *s) {
    for (;;) {
        while (s->first < s->last) {
            ssize_t got = preadv(s->fd, s->vectors + s->first, s->last - s->first, (off_t)s->position);
            if (got < 0) return errno;
            if (got == 0) return ENDED;
            s->position += got;
            for (; s->first < s->last && (size_t)got >= s->vectors[s->first].iov_len; s->first++)
                got -= (ssize_t)s->vectors[s->first].iov_len;
            if (got > 0) {
                s->vectors[s->first].iov_base = (uint8_t *)s->vectors[s->first].iov_base + got;
                s->vectors[s->first].iov_len -= (size_t)got;
            }
        }
        check_batch(s);
        if (s->position >= s->stop) return 0;
        plan_batch(s);
    }
}

/* Adds up what each item takes; false: the pieces overlap, are not in order, or lie outside the range. */
static bool measure(const scatter *s, Py_ssize_t num_items) {
    int64_t at = s->position;
    for (Py_ssize_t i = 0; i < s->num_pieces; i++) {
        const piece *p = s->pieces + i;
        if (p->size <= 0 || p->offset < at || p->offset > s->stop || p->size > s->stop - p->offset) return false;
        if (p->item < 0 || p->item >= num_items) return false;
        if ((uint64_t)p->size > (uint64_t)(PY_SSIZE_T_MAX / 2) - s->items[p->item].size) return false; /* 32-bit systems */
        s->items[p->item].size += (size_t)p->size;
        at = p->offset + p->size;
    }
    return true;
}

static PyObject *make_objects(const scatter *s, Py_ssize_t num_items, const Py_buffer *ending) {
    PyObject *list = PyList_New(num_items);
    for (Py_ssize_t i = 0; list && i < num_items; i++) {
        item *made = s->items + i;
        if (!made->size) {
            PyList_SetItem(list, i, Py_NewRef(Py_None));
            continue;
        }
        PyObject *object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)made->size + ending->len);
        if (!object) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, object);
        made->crc = UINT32_MAX;
        made->next = made->checked = (uint8_t *)PyBytes_AsString(object);
        memcpy(made->next + made->size, ending->buf, (size_t)ending->len);
    }
    return list;
}

/* None in the place of each object that does not have its checksum. */
static void drop_damaged(PyObject *list, const item *items, Py_ssize_t num_items, const uint8_t *crcs) {
    for (Py_ssize_t i = 0; i < num_items; i++) {
        uint32_t expected; /* they lie in an index, at any address */
        memcpy(&expected, crcs + i * (Py_ssize_t)sizeof expected, sizeof expected);
        if (items[i].size && ~items[i].crc != expected) PyList_SetItem(list, i, Py_NewRef(Py_None));
    }
}

static PyObject *read_range(scatter *s, Py_ssize_t num_items, const Py_buffer *ending, const uint8_t *crcs) {
    if (!measure(s, num_items)) {
        PyErr_SetString(PyExc_ValueError, "expected pieces in order, apart, not empty and inside the range");
        return NULL;
    }
    /* glibc learns from a large block that is freed that blocks of this size come and go, and no longer gives the memory of the objects
     * back to the system as soon as they are; to get it again would cost more in page faults than the read itself. It learns up to 32 MiB. */
    PyMem_Free(PyMem_Malloc((size_t)(s->stop - s->position < LEARNT_BYTES ? s->stop - s->position : LEARNT_BYTES)));
    PyObject *list = make_objects(s, num_items, ending);
    if (!list) return NULL;
    int code;
    do {
        Py_BEGIN_ALLOW_THREADS
        code = run(s);
        Py_END_ALLOW_THREADS
    } while (code == EINTR && PyErr_CheckSignals() == 0);
    if (code == 0) {
        if (crcs) drop_damaged(list, s->items, num_items, crcs);
        return list;
    }
    Py_DECREF(list);
    if (code == ENDED) {
        PyErr_Format(PyExc_EOFError, "the file ends at %lld", (long long)s->position);
    } else if (code != EINTR) {
        errno = code;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}

static PyObject *scatter_read(PyObject *module, PyObject *args) {
    (void)module;
    long long start, stop;
    int fd;
    Py_ssize_t num_items;
    Py_buffer pieces, ending, crcs;
    if (!PyArg_ParseTuple(args, "iLLy*ny*z*:read", &fd, &start, &stop, &pieces, &num_items, &ending, &crcs)) return NULL;
    PyObject *result = NULL;
    bool fits = pieces.len % (Py_ssize_t)sizeof(piece) == 0 && 0 <= start && start <= stop && num_items >= 0 &&
                (!crcs.buf || crcs.len / (Py_ssize_t)sizeof(uint32_t) == num_items);
    scatter *s = PyMem_Calloc(1, sizeof *s);
    item *items = PyMem_Calloc(num_items > 0 ? (size_t)num_items : 1, sizeof *items);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit together");
    } else if (!s || !items) {
        PyErr_NoMemory();
    } else {
        s->fd = fd, s->position = start, s->stop = stop, s->items = items, s->check = crcs.buf;
        s->pieces = pieces.buf, s->num_pieces = pieces.len / (Py_ssize_t)sizeof(piece);
        result = read_range(s, num_items, &ending, crcs.buf);
    }
    PyMem_Free(items);
    PyMem_Free(s);
    PyBuffer_Release(&pieces);
    PyBuffer_Release(&ending);
    if (crcs.obj) PyBuffer_Release(&crcs);
    return result;
}

static PyMethodDef methods[] = {
    {"read", scatter_read, METH_VARARGS,
     "read(fd, start, stop, pieces, num_items, ending, crcs) -> list[bytes | None]\n\n"
     "Reads the bytes [start, stop) of a file once. pieces: (offset, size, item) as int64, in the order of the file; an item is its\n"
     "pieces and the ending. crcs: uint32, CRC-32C of each item, or None. None takes the place of items without pieces, and of those\n"
     "that do not have their CRC-32C. Raises ValueError, EOFError, OSError, MemoryError."},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    (void)module;
    pcr_crc32c_fill(crc_table);
#if PCR_HAVE_AVX2
    if (pcr_have_avx2()) crc32c = pcr_crc32c_avx2;
#endif
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)prepare}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_scatter", .m_doc = "Scattered reads into bytes objects.", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__scatter(void) { return PyModuleDef_Init(&definition); }
