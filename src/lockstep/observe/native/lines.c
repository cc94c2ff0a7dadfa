/* Lines of programs that have asked for an operation before, and what is recorded of it: see `line_words.py`. */

#include "held.h"
#include <frameobject.h>

#if PY_VERSION_HEX < 0x030b0000
#define PyFrame_GetLasti(frame) ((frame)->f_lasti < 0 ? -1 : (frame)->f_lasti * (int)sizeof(_Py_CODEUNIT))
#endif

/* The code of a frame, so many away from the one that calls: a new reference, with the instruction; or NULL without an
   error. No frame is made of those in between. */
PyObject *
code_at(long depth, int32_t *instruction)
{
    PyObject *away = PyLong_FromLong(depth), *frame = away == NULL ? NULL : PyObject_CallOneArg(get_frame, away), *code;
    Py_XDECREF(away);
    if (frame == NULL) {
        PyErr_Clear(); /* the stack is not so deep */
        return NULL;
    }
    code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    *instruction = PyFrame_GetLasti((PyFrameObject *)frame);
    Py_DECREF(frame);
    return code;
}

/* What the tables of `call_site.py` have it by: a new reference, or NULL with an error. */
PyObject *
key_of(PyObject *code, int32_t instruction)
{
    return Py_BuildValue("Ni", PyLong_FromVoidPtr(code), (int)instruction);
}

/* Whether that frame is there, whose code is kept in `line`. */
int
line_at(long depth, Line *line)
{
    return (line->code = code_at(depth, &line->instruction)) != NULL;
}

/* ---------------------------------------------------------------- tensors */

/* What a tensor is like, as DLPack has it: told by torch without an object of Python's for each size. */
typedef struct {
    void *data;
    int32_t device[2], sizes, dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} Told; /* DLTensor */
typedef struct {
    uint32_t major, minor;
    void *others[4];
    int (*tell)(PyObject *tensor, Told *told);
} Exchange; /* DLPackExchangeAPI, whose layout is the same for all of version 1 */
static PyTypeObject *tensor_type; /* torch.Tensor, whose API `exchange` is; NULL before it was asked for */
static const Exchange *exchange;

/* Ask torch for it, once it is there. */
static void
find_exchange(void)
{
    PyObject *name = PyUnicode_FromString("torch"), *torch = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *type = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
    PyObject *capsule = type == NULL ? NULL : PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const Exchange *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (type != NULL && PyType_Check(type))
        tensor_type = (PyTypeObject *)Py_NewRef(type); /* for good */
    if (found != NULL && found->major == 1)
        exchange = found;
    PyErr_Clear(); /* torch before 2.10 has none */
    Py_XDECREF(capsule);
    Py_XDECREF(type);
    Py_XDECREF(torch);
    Py_XDECREF(name);
}

/* The line has what this tensor is like, which is of torch's own class: no other's code runs for that. */
int
describe(Line *line, PyObject *tensor)
{
    Told told;
    if (tensor_type == NULL)
        find_exchange();
    if (exchange == NULL || exchange->tell == NULL || Py_TYPE(tensor) != tensor_type)
        return 0;
    if (exchange->tell(tensor, &told) != 0) {
        PyErr_Clear(); /* of a dtype that DLPack has not */
        return 0;
    }
    if (told.sizes > SIZES_MAX)
        return 0;
    line->sizes = told.sizes;
    line->dtype = told.dtype;
    memcpy(line->shape, told.shape, told.sizes * sizeof(int64_t));
    return 1;
}

/* ---------------------------------------------------------------- what was found last */

enum { LINES = 256 };

/* For calls that fall on the same place: as `of_lines` has it, found again without a key. What they hold is kept for as
   long as they are here. */
static Line lines[LINES];

static Line *
place_of(const Line *line)
{
    uintptr_t hash = ((uintptr_t)line->code + (uintptr_t)line->of_lines) / 32 + line->instruction / 2;
    hash = hash * 31 + ((uintptr_t)line->reduce + (uintptr_t)line->label) / 16 + line->reduction + line->root;
    for (int at = 0; at < line->sizes; at++) /* one line may reduce all tensors of a model */
        hash = hash * 31 + (uintptr_t)line->shape[at];
    return &lines[(hash ^ hash >> 8 ^ hash >> 16) % LINES];
}

/* The words of such a call: a new reference, or NULL without an error. */
PyObject *
words_at(const Line *line)
{
    const Line *b = place_of(line), *a = line;
    int is_same = a->of_lines == b->of_lines && a->code == b->code && a->instruction == b->instruction &&
                  a->reduce == b->reduce && a->label == b->label && a->reduction == b->reduction &&
                  a->root == b->root && a->sizes == b->sizes && a->dtype == b->dtype &&
                  memcmp(a->shape, b->shape, a->sizes * sizeof(int64_t)) == 0;
    return is_same ? Py_XNewRef(b->words) : NULL;
}

void
keep_line(Line line, PyObject *words)
{
    Line *place = place_of(&line), before = *place;
    line.words = words;
    PyObject *kept[] = {line.of_lines, line.code, line.reduce, line.label, line.words};
    PyObject *left[] = {before.of_lines, before.code, before.reduce, before.label, before.words};
    for (size_t at = 0; at < sizeof(kept) / sizeof(*kept); at++)
        Py_XINCREF(kept[at]);
    *place = line; /* whole, before anything that was kept goes and calls who knows what */
    for (size_t at = 0; at < sizeof(left) / sizeof(*left); at++)
        Py_XDECREF(left[at]);
}
