/* pcrshard.native._scatter: a range of a file or of memory into many bytes objects, joined and
 * checked in the same pass, and samples made of them.
 *
 * POSIX calls it a scattered read (readv). It is a module of its own because only CPython's
 * interface makes bytes objects that can be filled; everything else is in the core, which knows
 * nothing of Python.
 */
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* preadv */
#endif
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python has no limited interface yet */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <sys/uio.h>

#include "src/crc32c.h"

enum {
    ENDED = -1,
    MAX_VECTORS = 512,     /* of the 1024 that Linux, the BSDs and macOS take */
    /* Read at a time, so that they are in the processor's cache when their checksums are made. */
    BATCH_BYTES = 1 << 18,
    GAP_BYTES = 4096,
    LEARNT_BYTES = 31 << 20
};

typedef uint32_t (*crc32c_fn)(const uint32_t (*)[256], uint32_t, const uint8_t *, size_t);

typedef struct {
    size_t size;
    uint8_t *next;    /* where the next piece goes */
    uint8_t *checked; /* up to here the checksum was made */
    uint32_t crc;
} item;

typedef struct {
    int64_t offset;
    uint32_t size;         /* in the file */
    uint16_t header_bytes; /* put before them */
    bool apart;            /* what lies before it is read on its own */
    const uint8_t *header;
    item *owner;
} piece;

typedef struct { /* what scatter.py calls Groups; the arrays lie in an index, at any address */
    Py_ssize_t num_rows, num_items, num_ended, base;
    const uint8_t *sizes, *starts, *offsets, *header_sizes, *header, *headers_stop;
} groups;

typedef struct {
    int fd; /* of what is not in memory */
    const uint8_t *memory;
    int64_t memory_start, memory_stop; /* offsets in the file of what is */
    int64_t position, stop, laid_out;
    piece *pieces; /* in the order of the file */
    Py_ssize_t num_pieces;
    Py_ssize_t done;    /* pieces that were asked for */
    Py_ssize_t checked; /* pieces of which the checksums were made */
    item *items;
    bool check;
    int first, last; /* vectors that are not filled yet */
    struct iovec vectors[MAX_VECTORS];
    uint8_t gap[GAP_BYTES]; /* what is between pieces: headers and padding of the tar */
} scatter;

static uint32_t crc_table[8][256]; /* written once, at import */
static crc32c_fn crc32c = pcr_crc32c_portable;

static void add_vector(scatter *s, uint8_t *base, int64_t size) {
    s->vectors[s->last++] = (struct iovec){base, (size_t)size};
}

/* Copies the header of a piece that is to be read; returns where its own bytes go. */
static uint8_t *begin_piece(const piece *next) {
    item *owner = next->owner;
    if (next->header_bytes) memcpy(owner->next, next->header, next->header_bytes);
    uint8_t *own = owner->next + next->header_bytes;
    owner->next = own + next->size;
    return own;
}

static void plan_batch(scatter *s) {
    s->first = s->last = 0;
    if (s->done < s->num_pieces && s->pieces[s->done].apart)
        s->position = s->pieces[s->done].offset;
    int64_t at = s->position;
    while (s->last < MAX_VECTORS && at - s->position < BATCH_BYTES) {
        if (s->done == s->num_pieces) {
            if (!s->last) s->position = s->stop;
            return;
        }
        const piece *next = s->pieces + s->done;
        if (at == next->offset) {
            add_vector(s, begin_piece(next), next->size);
            s->done++;
            at += next->size;
            continue;
        }
        if (next->apart) return;
        int64_t gap = next->offset - at < GAP_BYTES ? next->offset - at : GAP_BYTES;
        add_vector(s, s->gap, gap);
        at += gap;
    }
}

static void check_batch(scatter *s) {
    for (; s->checked < s->done; s->checked++) {
        const piece *done = s->pieces + s->checked;
        item *owner = done->owner;
        const uint32_t(*table)[256] = (const uint32_t(*)[256])crc_table;
        size_t size = (size_t)done->header_bytes + done->size;
        if (s->check) owner->crc = crc32c(table, owner->crc, owner->checked, size);
        owner->checked += size;
    }
}

/* Drops vectors that are filled, up to got bytes of them. */
static void advance(scatter *s, size_t got) {
    s->position += (int64_t)got;
    for (; s->first < s->last && got >= s->vectors[s->first].iov_len; s->first++)
        got -= s->vectors[s->first].iov_len;
    if (got > 0) {
        s->vectors[s->first].iov_base = (uint8_t *)s->vectors[s->first].iov_base + got;
        s->vectors[s->first].iov_len -= got;
    }
}

static int read_batch(scatter *s) {
    while (s->first < s->last) {
        const struct iovec *vectors = s->vectors + s->first;
        ssize_t got = preadv(s->fd, vectors, s->last - s->first, (off_t)s->position);
        if (got < 0) return errno;
        if (got == 0) return ENDED;
        advance(s, (size_t)got);
    }
    return 0;
}

/* Fills vectors with what is in memory. */
static void copy_batch(scatter *s) {
    while (s->first < s->last && s->position < s->memory_stop) {
        const struct iovec *vector = s->vectors + s->first;
        size_t size = (size_t)(s->memory_stop - s->position);
        if (size > vector->iov_len) size = vector->iov_len;
        const uint8_t *from = s->memory + (s->position - s->memory_start);
        if (vector->iov_base != s->gap) memcpy(vector->iov_base, from, size);
        advance(s, size);
    }
}

/* 0, ENDED where the file does, or errno; may be called again after EINTR. */
static int run(scatter *s) { /* needs no interpreter */
    for (;;) {
        copy_batch(s);
        int code = read_batch(s);
        if (code) return code;
        check_batch(s);
        if (s->position >= s->stop) return 0;
        plan_batch(s);
    }
}

static uint16_t load16(const uint8_t *array, Py_ssize_t i) {
    uint16_t value;
    memcpy(&value, array + i * (Py_ssize_t)sizeof value, sizeof value);
    return value;
}

static uint32_t load32(const uint8_t *array, Py_ssize_t i) {
    uint32_t value;
    memcpy(&value, array + i * (Py_ssize_t)sizeof value, sizeof value);
    return value;
}

static int64_t load64(const uint8_t *array, Py_ssize_t i) {
    int64_t value;
    memcpy(&value, array + i * (Py_ssize_t)sizeof value, sizeof value);
    return value;
}

/* Adds one piece; returns the offset after it, or -1 if it overlaps what is laid out, lies before
 * it, lies outside the range, or has no header where it claims one. */
static int64_t add_piece(scatter *s, groups *g, int64_t offset, Py_ssize_t at, bool apart) {
    uint32_t size = load32(g->sizes, at);
    uint16_t header_bytes = g->header_sizes ? load16(g->header_sizes, at) : 0;
    item *owner = s->items + at % g->num_items;
    if (!size) return offset;
    if (header_bytes > size || header_bytes > g->headers_stop - g->header) return -1;
    if (size > (size_t)(PY_SSIZE_T_MAX / 2) - owner->size) return -1; /* 32-bit systems */
    owner->size += size;
    size -= header_bytes;
    if (offset < s->laid_out || offset > s->stop || size > s->stop - offset) return -1;
    s->pieces[s->num_pieces++] = (piece){offset, size, header_bytes, apart, g->header, owner};
    g->header += header_bytes;
    s->laid_out = offset + size;
    return s->laid_out;
}

/* Base groups lie item by item, the others one after another. */
static bool lay_out(scatter *s, groups *g) {
    for (Py_ssize_t i = 0; g->base && i < g->num_items; i++) {
        int64_t offset = load64(g->offsets, i);
        for (Py_ssize_t row = 0; row < g->base; row++) {
            offset = add_piece(s, g, offset, row * g->num_items + i, !s->num_pieces);
            if (offset < 0) return false;
        }
    }
    for (Py_ssize_t row = g->base; row < g->num_rows; row++) {
        int64_t offset = load64(g->starts, row);
        Py_ssize_t before = s->num_pieces;
        for (Py_ssize_t i = 0; i < g->num_items; i++) {
            bool apart = s->num_pieces == before;
            offset = add_piece(s, g, offset, row * g->num_items + i, apart);
            if (offset < 0) return false;
        }
    }
    return g->header == g->headers_stop;
}

static PyObject *make_objects(const scatter *s, const groups *g, const Py_buffer *ending,
                              const uint8_t *seeds) {
    PyObject *list = PyList_New(g->num_items);
    for (Py_ssize_t i = 0; list && i < g->num_items; i++) {
        item *made = s->items + i;
        Py_ssize_t ending_bytes = i < g->num_ended ? ending->len : 0;
        if (!made->size) {
            PyList_SetItem(list, i, Py_NewRef(Py_None));
            continue;
        }
        PyObject *object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)made->size + ending_bytes);
        if (!object) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, object);
        made->crc = seeds ? ~load32(seeds, i) : UINT32_MAX;
        made->next = made->checked = (uint8_t *)PyBytes_AsString(object);
        memcpy(made->next + made->size, ending->buf, (size_t)ending_bytes);
    }
    return list;
}

/* The indexes of the objects that do not have their checksum. */
static PyObject *list_damaged(const item *items, Py_ssize_t num_items, const uint8_t *crcs) {
    PyObject *damaged = PyList_New(0);
    for (Py_ssize_t i = 0; damaged && crcs && i < num_items; i++) {
        if (!items[i].size || ~items[i].crc == load32(crcs, i)) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (!index || PyList_Append(damaged, index) < 0) Py_CLEAR(damaged);
        Py_XDECREF(index);
    }
    return damaged;
}

/* Takes the list of objects. */
static PyObject *with_damaged(PyObject *list, PyObject *damaged) {
    PyObject *pair = damaged ? PyTuple_Pack(2, list, damaged) : NULL;
    Py_DECREF(list);
    Py_XDECREF(damaged);
    return pair;
}

/* glibc learns from a large block that is freed that blocks of this size come and go, and no longer
 * gives the memory of the objects back to the system as soon as they are freed; to get it again
 * would cost more in page faults than the read itself. It learns up to 32 MiB. */
static void keep_memory(int64_t size) {
    PyMem_Free(PyMem_Malloc((size_t)(size < LEARNT_BYTES ? size : LEARNT_BYTES)));
}

static PyObject *read_range(scatter *s, groups *g, const Py_buffer *ending, const uint8_t *crcs,
                            const uint8_t *seeds) {
    if (!lay_out(s, g)) {
        PyErr_SetString(PyExc_ValueError,
                        "expected pieces in order, apart, inside the range, with their headers");
        return NULL;
    }
    keep_memory(s->stop - s->position);
    PyObject *list = make_objects(s, g, ending, seeds);
    if (!list) return NULL;
    int code;
    do {
        Py_BEGIN_ALLOW_THREADS
        code = run(s);
        Py_END_ALLOW_THREADS
    } while (code == EINTR && PyErr_CheckSignals() == 0);
    if (code == 0) return with_damaged(list, list_damaged(s->items, g->num_items, crcs));
    Py_DECREF(list);
    if (code == ENDED) {
        PyErr_Format(PyExc_EOFError, "the file ends at %lld", (long long)s->position);
    } else if (code != EINTR) {
        errno = code;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return NULL;
}

static bool holds(const Py_buffer *array, Py_ssize_t count, size_t size) {
    return array->len % (Py_ssize_t)size == 0 && array->len / (Py_ssize_t)size == count;
}

typedef struct { /* arguments of read that are released afterwards */
    Py_buffer memory, sizes, starts, offsets, ending, crcs, seeds, header_sizes, headers, ahead;
} buffers;

static void release(Py_buffer *buffer) {
    if (buffer->obj) PyBuffer_Release(buffer);
}

static bool fits(const groups *g, const buffers *b) {
    if (g->num_items < 0) return false;
    if (g->num_items && g->num_rows > PY_SSIZE_T_MAX / g->num_items) return false;
    if (!holds(&b->sizes, g->num_rows * g->num_items, sizeof(uint32_t))) return false;
    if (g->base < 0 || g->base > g->num_rows) return false;
    if (b->header_sizes.obj &&
        !holds(&b->header_sizes, g->num_rows * g->num_items, sizeof(uint16_t)))
        return false;
    if (g->base && !holds(&b->offsets, g->num_items, sizeof(int64_t))) return false;
    if (b->seeds.obj && !holds(&b->seeds, g->num_items, sizeof(uint32_t))) return false;
    return !b->crcs.obj || holds(&b->crcs, g->num_items, sizeof(uint32_t));
}

static PyObject *read_into_objects(scatter *s, groups *g, const buffers *b) {
    PyObject *result = NULL;
    s->items = PyMem_Calloc((size_t)g->num_items + 1, sizeof *s->items);
    s->pieces = PyMem_Calloc((size_t)(g->num_rows * g->num_items) + 1, sizeof *s->pieces);
    if (s->items && s->pieces)
        result = read_range(s, g, &b->ending, b->crcs.buf, b->seeds.buf);
    else
        PyErr_NoMemory();
    PyMem_Free(s->pieces);
    PyMem_Free(s->items);
    return result;
}

/* Where the range is: in a file, of which the first bytes may be in memory already, or in a buffer
 * that holds it. */
static bool take_source(scatter *s, PyObject *source, buffers *b) {
    if (PyLong_Check(source)) {
        s->memory = b->ahead.buf;
        s->memory_stop = b->ahead.len;
        s->fd = (int)PyLong_AsLong(source);
        return !PyErr_Occurred();
    }
    if (PyObject_GetBuffer(source, &b->memory, PyBUF_SIMPLE) < 0) return false;
    s->fd = -1;
    s->memory = b->memory.buf;
    s->memory_start = s->position;
    s->memory_stop = s->stop;
    if (b->memory.len == s->stop - s->position) return true;
    PyErr_SetString(PyExc_ValueError, "expected a buffer that holds the range");
    return false;
}

static PyObject *scatter_read(PyObject *module, PyObject *args) {
    (void)module;
    long long start, stop;
    PyObject *source;
    groups g;
    buffers b = {0};
    if (!PyArg_ParseTuple(args, "OLLnny*y*nz*z*y*y*z*z*y*:read", &source, &start, &stop,
                          &g.num_items, &g.num_ended, &b.sizes, &b.starts, &g.base, &b.offsets,
                          &b.header_sizes, &b.headers, &b.ending, &b.crcs, &b.seeds, &b.ahead))
        return NULL;
    g.num_rows = b.starts.len / (Py_ssize_t)sizeof(int64_t);
    g.sizes = b.sizes.buf;
    g.starts = b.starts.buf;
    g.offsets = b.offsets.buf;
    g.header_sizes = b.header_sizes.buf;
    g.header = b.headers.buf;
    g.headers_stop = g.header + b.headers.len;
    PyObject *result = NULL;
    scatter *s = PyMem_Calloc(1, sizeof *s);
    if (!s) {
        PyErr_NoMemory();
    } else if (!fits(&g, &b) || start < 0 || stop < start) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit together");
    } else {
        s->position = s->laid_out = start;
        s->stop = stop;
        s->check = b.crcs.obj;
        if (take_source(s, source, &b)) result = read_into_objects(s, &g, &b);
    }
    PyMem_Free(s);
    release(&b.memory);
    release(&b.sizes);
    release(&b.starts);
    release(&b.offsets);
    release(&b.ending);
    release(&b.crcs);
    release(&b.seeds);
    release(&b.header_sizes);
    release(&b.headers);
    release(&b.ahead);
    return result;
}

static PyObject *make_row(PyObject *names, PyObject *columns, Py_ssize_t i) {
    PyObject *row = PyDict_New();
    for (Py_ssize_t j = 0; row && j < PyTuple_Size(names); j++) {
        PyObject *value = PySequence_GetItem(PyTuple_GetItem(columns, j), i);
        if (!value || PyDict_SetItem(row, PyTuple_GetItem(names, j), value)) Py_CLEAR(row);
        Py_XDECREF(value);
    }
    return row;
}

static PyObject *scatter_rows(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *names, *columns;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "O!O!n:rows", &PyTuple_Type, &names, &PyTuple_Type, &columns,
                          &count))
        return NULL;
    if (PyTuple_Size(names) != PyTuple_Size(columns) || count < 0) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit together");
        return NULL;
    }
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *row = make_row(names, columns, i);
        if (!row || PyList_SetItem(list, i, row)) Py_CLEAR(list);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"read", scatter_read, METH_VARARGS,
     "read(source, start, stop, num_items, num_ended, sizes, starts, base, offsets,\n"
     "header_sizes, headers, ending, crcs, seeds, ahead)\n\n"
     "See pcrshard.native.scatter.read. Arrays are contiguous: sizes, crcs and seeds of uint32,\n"
     "starts and offsets of int64, header_sizes of uint16."},
    {"rows", scatter_rows, METH_VARARGS,
     "rows(names, columns, count) -> list[dict]\n\n"
     "The first rows of a table given by columns, each a list or tuple, as dicts."},
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

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)prepare},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* nothing is shared but tables that are written at import */
#endif
    {0, NULL},
};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_scatter",
    .m_doc = "Scattered reads into bytes objects.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__scatter(void) { return PyModuleDef_Init(&definition); }
