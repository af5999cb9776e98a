/* pcrshard.native._scatter: a range of a file into many bytes objects, without a buffer in between, and samples made of them.
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
    size_t size;
    uint8_t *next, *checked; /* next: where the next piece goes; up to checked the checksum was made */
    uint32_t crc;
} item;

typedef struct {
    int64_t offset;
    uint32_t size;
    item *owner;
} piece;

typedef struct { /* what scatter.py calls Groups; the arrays lie in an index, at any address */
    Py_ssize_t num_rows, num_items, base;
    const uint8_t *sizes, *starts, *offsets;
} groups;

typedef struct {
    int fd;
    int64_t position, stop, laid_out;
    piece *pieces; /* in the order of the file */
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
            vector->iov_base = next->owner->next;
            vector->iov_len = next->size;
            next->owner->next += next->size;
            s->done++;
        }
        at += (int64_t)vector->iov_len;
    }
}

static void check_batch(scatter *s) {
    for (; s->checked < s->done; s->checked++) {
        const piece *done = s->pieces + s->checked;
        item *owner = done->owner;
        if (s->check) owner->crc = crc32c((const uint32_t (*)[256])crc_table, owner->crc, owner->checked, done->size);
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

/* Count pieces that lie one behind the other from offset on, whose sizes are each step-th of the table from first on.
 * False: they overlap what is laid out, are not behind it, or lie outside the range. */
static bool add_run(scatter *s, const groups *g, int64_t offset, Py_ssize_t first, Py_ssize_t step, Py_ssize_t count) {
    for (; count > 0; count--, first += step) {
        uint32_t size = load32(g->sizes, first);
        item *owner = s->items + first % g->num_items;
        if (!size) continue;
        if (offset < s->laid_out || offset > s->stop || size > s->stop - offset) return false;
        if (size > (size_t)(PY_SSIZE_T_MAX / 2) - owner->size) return false; /* 32-bit systems */
        s->pieces[s->num_pieces++] = (piece){offset, size, owner};
        owner->size += size;
        s->laid_out = offset += size;
    }
    return true;
}

/* Base groups lie item by item, the others one after another. */
static bool lay_out(scatter *s, const groups *g) {
    bool fits = true;
    for (Py_ssize_t i = 0; g->base && fits && i < g->num_items; i++)
        fits = add_run(s, g, load64(g->offsets, i), i, g->num_items, g->base);
    for (Py_ssize_t row = g->base; fits && row < g->num_rows; row++)
        fits = add_run(s, g, load64(g->starts, row), row * g->num_items, 1, g->num_items);
    return fits;
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
        if (items[i].size && ~items[i].crc != load32(crcs, i)) PyList_SetItem(list, i, Py_NewRef(Py_None));
    }
}

static PyObject *read_range(scatter *s, const groups *g, const Py_buffer *ending, const uint8_t *crcs) {
    if (!lay_out(s, g)) {
        PyErr_SetString(PyExc_ValueError, "expected pieces in order, apart and inside the range");
        return NULL;
    }
    /* glibc learns from a large block that is freed that blocks of this size come and go, and no longer gives the memory of the objects
     * back to the system as soon as they are; to get it again would cost more in page faults than the read itself. It learns up to 32 MiB. */
    PyMem_Free(PyMem_Malloc((size_t)(s->stop - s->position < LEARNT_BYTES ? s->stop - s->position : LEARNT_BYTES)));
    PyObject *list = make_objects(s, g->num_items, ending);
    if (!list) return NULL;
    int code;
    do {
        Py_BEGIN_ALLOW_THREADS
        code = run(s);
        Py_END_ALLOW_THREADS
    } while (code == EINTR && PyErr_CheckSignals() == 0);
    if (code == 0) {
        if (crcs) drop_damaged(list, s->items, g->num_items, crcs);
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

static bool holds(const Py_buffer *array, Py_ssize_t count, size_t size) {
    return array->len % (Py_ssize_t)size == 0 && array->len / (Py_ssize_t)size == count;
}

static bool fits(const groups *g, const Py_buffer *sizes, const Py_buffer *offsets, const Py_buffer *crcs) {
    if (g->num_items < 0 || (g->num_items && g->num_rows > PY_SSIZE_T_MAX / g->num_items)) return false;
    return holds(sizes, g->num_rows * g->num_items, sizeof(uint32_t)) && 0 <= g->base && g->base <= g->num_rows &&
           (!g->base || holds(offsets, g->num_items, sizeof(int64_t))) && (!crcs->obj || holds(crcs, g->num_items, sizeof(uint32_t)));
}

static PyObject *scatter_read(PyObject *module, PyObject *args) {
    (void)module;
    long long start, stop;
    int fd;
    groups g;
    Py_buffer sizes, starts, offsets, ending, crcs;
    if (!PyArg_ParseTuple(args, "iLLny*y*nz*y*z*:read", &fd, &start, &stop, &g.num_items, &sizes, &starts, &g.base, &offsets, &ending, &crcs))
        return NULL;
    g.num_rows = starts.len / (Py_ssize_t)sizeof(int64_t);
    g.sizes = sizes.buf, g.starts = starts.buf, g.offsets = offsets.buf;
    PyObject *result = NULL;
    if (!fits(&g, &sizes, &offsets, &crcs) || start < 0 || stop < start) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit together");
    } else {
        scatter *s = PyMem_Calloc(1, sizeof *s);
        item *items = PyMem_Calloc((size_t)g.num_items + 1, sizeof *items);
        piece *pieces = PyMem_Calloc((size_t)(g.num_rows * g.num_items) + 1, sizeof *pieces);
        if (!s || !items || !pieces) {
            PyErr_NoMemory();
        } else {
            s->fd = fd, s->position = s->laid_out = start, s->stop = stop, s->items = items, s->pieces = pieces, s->check = crcs.obj;
            result = read_range(s, &g, &ending, crcs.buf);
        }
        PyMem_Free(pieces);
        PyMem_Free(items);
        PyMem_Free(s);
    }
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&ending);
    if (offsets.obj) PyBuffer_Release(&offsets);
    if (crcs.obj) PyBuffer_Release(&crcs);
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
    if (!PyArg_ParseTuple(args, "O!O!n:rows", &PyTuple_Type, &names, &PyTuple_Type, &columns, &count)) return NULL;
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
     "read(fd, start, stop, num_items, sizes, starts, base, offsets, ending, crcs) -> list[bytes | None]\n\n"
     "See pcrshard.native.scatter.read. Arrays are contiguous: sizes and crcs of uint32, starts and offsets of int64."},
    {"rows", scatter_rows, METH_VARARGS,
     "rows(names, columns, count) -> list[dict]\n\nThe first rows of a table given by columns, each a list or tuple, as dicts."},
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
