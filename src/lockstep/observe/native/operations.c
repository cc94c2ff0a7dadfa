/* An operation from its asking to its end: see `recording.py`. */

#include "held.h"
#include <frameobject.h>

enum { DEPTH = 2 }; /* frames from who submits an all_reduce to who has asked for it */

#if PY_VERSION_HEX < 0x030b0000
#define PyFrame_GetLasti(frame) ((frame)->f_lasti < 0 ? -1 : (frame)->f_lasti * (int)sizeof(_Py_CODEUNIT))
#endif

/* ---------------------------------------------------------------- GuardLayer.submit */

/* Who called the function that has called the caller of this, and so on; a new reference, or NULL without an error. */
static PyFrameObject *
frame_above(int depth)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != NULL && depth-- > 0) {
        PyFrameObject *below = frame;
        frame = PyFrame_GetBack(below);
        Py_DECREF(below);
    }
    return frame;
}

/* What was found last for lines that fall on the same place: as `of_lines` has it, found again without a key. */
typedef struct {
    PyObject *of_lines, *code, *shape, *dtype, *reduce, *label, *words; /* kept for as long as they are here */
    int instruction;
} Line;
static Line lines[64];

/* Its words, a new reference; NULL, maybe with an error, where it is another line or another call there. */
static PyObject *
recalled(const Line *line, PyObject *its_shape)
{
    if (PyObject_RichCompareBool(line->shape, its_shape, Py_EQ) != 1)
        return NULL;
    return Py_NewRef(line->words);
}

static void
forget(Line *line)
{
    PyObject *kept[] = {line->of_lines, line->code,  line->shape, line->dtype,
                        line->reduce,   line->label, line->words};
    for (size_t at = 0; at < sizeof(kept) / sizeof(*kept); at++)
        Py_XDECREF(kept[at]);
}

/* The words of this call in `of_lines`, which the line is to recall: a new reference; NULL, maybe with an error. */
static PyObject *
looked_up(Line *line, Line found)
{
    PyObject *id = PyLong_FromVoidPtr(found.code), *instruction = PyLong_FromLong(found.instruction), *key = NULL;
    if (id != NULL && instruction != NULL)
        key = PyTuple_Pack(7, id, instruction, found.shape, found.dtype, found.reduce, found.label, Py_None);
    if (key != NULL && (found.words = PyDict_GetItemWithError(found.of_lines, key)) != NULL) {
        PyObject *kept[] = {found.of_lines, found.code,  found.shape, found.dtype,
                            found.reduce,   found.label, found.words, found.words}; /* the last is the caller's */
        for (size_t at = 0; at < sizeof(kept) / sizeof(*kept); at++)
            Py_INCREF(kept[at]);
        Line before = *line;
        *line = found; /* whole, before anything that was kept goes and calls who knows what */
        forget(&before);
    }
    Py_XDECREF(key);
    Py_XDECREF(instruction);
    Py_XDECREF(id);
    return found.words;
}

/* The words of this all_reduce in `of_lines`: a new reference; NULL, maybe with an error, where it is not known. */
static PyObject *
words_of(PyObject *op, PyObject *of_lines)
{
    PyObject *inputs = PyTuple_GET_ITEM(op, 2), *words = NULL;
    PyFrameObject *frame = NULL;
    if (of_lines == NULL || !PyTuple_Check(inputs) || PyTuple_GET_SIZE(inputs) == 0)
        return NULL;
    if ((frame = frame_above(DEPTH)) == NULL)
        return NULL;
    PyObject *tensor = PyTuple_GET_ITEM(inputs, 0);
    Line found = {
        .of_lines = of_lines,
        .code = (PyObject *)PyFrame_GetCode(frame),
        .instruction = PyFrame_GetLasti(frame),
        .shape = PyObject_GetAttr(tensor, name_shape),
        .dtype = PyObject_GetAttr(tensor, name_dtype),
        .reduce = PyTuple_GET_ITEM(op, 5),
        .label = PyTuple_GET_ITEM(op, 7),
    };
    if (found.shape != NULL && found.dtype != NULL) {
        Line *line = &lines[((uintptr_t)found.code / 32 + (uintptr_t)of_lines / 32 + found.instruction / 2) % 64];
        int is_same = line->of_lines == of_lines && line->code == found.code && line->instruction == found.instruction &&
                      line->dtype == found.dtype && line->reduce == found.reduce && line->label == found.label;
        if (is_same)
            words = recalled(line, found.shape);
        if (words == NULL && !PyErr_Occurred())
            words = looked_up(line, found);
    }
    Py_XDECREF(found.dtype);
    Py_XDECREF(found.shape);
    Py_DECREF(found.code);
    Py_DECREF(frame);
    return words;
}

/* RecordedWork(work, layer, number). */
static PyObject *
recorded(PyObject *work, PyObject *layer, long long number)
{
    PyObject *made = PyBaseObject_Type.tp_new(classes[WORK].type, nothing, NULL), *its = PyLong_FromLongLong(number);
    if (made == NULL || its == NULL) {
        Py_XDECREF(made);
        Py_XDECREF(its);
        return NULL;
    }
    hold(made, WORK, W_NUMBER, its);
    hold(made, WORK, W_WORK, Py_NewRef(work));
    hold(made, WORK, W_LAYER, Py_NewRef(layer));
    hold(made, WORK, W_OTHERS, Py_NewRef(nothing));
    hold(made, WORK, W_ERRORS, Py_NewRef(Py_None));
    return made;
}

/* The operation is entered: have it done, and waited for where it is not asynchronous. */
static PyObject *
carry_out(PyObject *layer, PyObject *op, PyObject *recorder, long long number, int64_t began_ns)
{
    PyObject *args[] = {HELD(layer, LAYER, L_INNER), op}, *result = NULL;
    int is_async = PyObject_IsTrue(PyTuple_GET_ITEM(op, 9));
    PyObject *work = is_async < 0 ? NULL : PyObject_VectorcallMethod(name_submit, args, 2, NULL);
    if (work != NULL && is_async) {
        result = recorded(work, layer, number);
    } else if (work != NULL) {
        PyObject *done = PyObject_VectorcallMethod(name_wait, &work, 1, NULL);
        if (done != NULL) {
            result = Py_NewRef(work);
            Py_DECREF(done);
        } else if (PyErr_ExceptionMatches(comm_error)) {
            PyErr_Clear(); /* who has asked waits at once: that raises it, with its cause */
            result = recorded(work, layer, -1);
        }
        if (result != NULL && stood(recorder, number, began_ns, 0) < 0)
            Py_CLEAR(result);
    }
    if (result == NULL)
        leave(recorder, number, now());
    Py_XDECREF(work);
    return result;
}

PyObject *
quick_submit(PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !IS(args[0], LAYER) || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 11)
        return DECLINED;
    PyObject *layer = args[0], *op = args[1], *recorder = HELD(layer, LAYER, L_RECORDER), *words, *answer = DECLINED;
    if (PyTuple_GET_ITEM(op, 1) != name_all_reduce || PyTuple_GET_ITEM(op, 10) != Py_None)
        return DECLINED;
    if (HELD(layer, LAYER, L_IS_QUEUED) != Py_False || !IS(recorder, RECORDER) || !can_stand(recorder))
        return DECLINED;
    if ((words = words_of(op, HELD(layer, LAYER, L_OF_LINES))) == NULL)
        return PyErr_Occurred() ? NULL : DECLINED;
    if (can_enter(recorder, words)) {
        int64_t began_ns = now();
        long long seq = next_of(HELD(layer, LAYER, L_COLLECTIVES));
        long long number = seq < 0 ? -1 : enter(recorder, seq, words, 0, began_ns);
        answer = number < 0 ? NULL : carry_out(layer, op, recorder, number, began_ns);
    }
    Py_DECREF(words);
    return answer;
}

/* ---------------------------------------------------------------- RecordedWork.wait, .__del__ */

/* It has ended, well or not. -1 with an error. */
static int
end(PyObject *self, PyObject *recorder, int64_t began_ns, int64_t ended_ns)
{
    long long number = number_in(self, WORK, W_NUMBER);
    PyObject *none = PyLong_FromLong(-1);
    if (none == NULL)
        return -1;
    hold(self, WORK, W_NUMBER, none);
    return number < 0 ? 0 : stood(recorder, number, began_ns, ended_ns); /* another thread may have waited, too */
}

/* Its work has raised: an error is set, and is so again. */
static void
fail(PyObject *self, PyObject *recorder, int64_t began_ns)
{
    PyObject *type, *error, *traceback, *done;
    int is_ours = PyErr_ExceptionMatches(comm_error);
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    if (is_ours) { /* as RecordedWork.wait has it */
        PyObject *args[] = {self, error};
        done = PyObject_VectorcallMethod(name_leave, args, 1, NULL);
        if (done != NULL) {
            Py_DECREF(done);
            done = PyObject_VectorcallMethod(name_fail, args, 2, NULL); /* raises */
            Py_XDECREF(done);
        }
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    } else {
        if (end(self, recorder, began_ns, 0) < 0)
            PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
}

PyObject *
quick_wait(PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || count > 2 || (count == 2 && args[1] != Py_None) || !IS(args[0], WORK))
        return DECLINED;
    PyObject *self = args[0], *layer = HELD(self, WORK, W_LAYER), *others = HELD(self, WORK, W_OTHERS);
    if (layer == NULL || !IS(layer, LAYER) || HELD(layer, LAYER, L_IS_QUEUED) != Py_False || others != nothing)
        return DECLINED;
    PyObject *recorder = HELD(layer, LAYER, L_RECORDER);
    if (!IS(recorder, RECORDER) || !can_stand(recorder) || number_in(self, WORK, W_NUMBER) < 0)
        return DECLINED;
    int64_t began_ns = now();
    PyObject *work = HELD(self, WORK, W_WORK), *done = PyObject_VectorcallMethod(name_wait, &work, 1, NULL), *ended;
    if (done == NULL) {
        fail(self, recorder, began_ns);
        return NULL;
    }
    Py_DECREF(done);
    if ((ended = PyObject_GetAttr(work, name_ended_ns)) == NULL)
        return NULL;
    long long at_ns = PyLong_AsLongLong(ended);
    Py_DECREF(ended);
    return PyErr_Occurred() || end(self, recorder, began_ns, at_ns) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
quick_del(PyObject *const *args, Py_ssize_t count)
{
    if (count != 1 || !IS(args[0], WORK) || number_in(args[0], WORK, W_NUMBER) >= 0)
        return DECLINED;
    return Py_NewRef(Py_None);
}
