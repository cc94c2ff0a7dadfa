/* An operation from its asking to its end: see `recording.py`. */

#include "held.h"

enum { DEPTH = 2 }; /* frames from who submits an all_reduce to who has asked for it */

/* ---------------------------------------------------------------- GuardLayer.submit */

/* Found in `of_lines`: borrowed; NULL, maybe with an error, where it is not known. */
static PyObject *
look_up(const Line *line, PyObject *tensor)
{
    PyObject *id = PyLong_FromVoidPtr(line->code), *instruction = PyLong_FromLong(line->instruction), *key = NULL;
    PyObject *shape = PyObject_GetAttr(tensor, name_shape), *dtype = PyObject_GetAttr(tensor, name_dtype), *words = NULL;
    if (id != NULL && instruction != NULL && shape != NULL && dtype != NULL)
        key = PyTuple_Pack(7, id, instruction, shape, dtype, line->reduce, line->label, Py_None);
    if (key != NULL)
        words = PyDict_GetItemWithError(line->of_lines, key);
    Py_XDECREF(key);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(instruction);
    Py_XDECREF(id);
    return words;
}

/* The words of this all_reduce in `of_lines`: a new reference; NULL, maybe with an error, where it is not known. */
static PyObject *
words_of(PyObject *op, PyObject *of_lines)
{
    PyObject *inputs = PyTuple_GET_ITEM(op, 2), *words = NULL;
    Line line = {.of_lines = of_lines, .reduce = PyTuple_GET_ITEM(op, 5), .label = PyTuple_GET_ITEM(op, 7)};
    if (of_lines == NULL || !PyTuple_Check(inputs) || PyTuple_GET_SIZE(inputs) == 0 || !line_at(DEPTH, &line))
        return NULL;
    PyObject *tensor = PyTuple_GET_ITEM(inputs, 0);
    int is_described = describe(&line, tensor);
    if ((!is_described || (words = words_at(&line)) == NULL) && (words = look_up(&line, tensor)) != NULL) {
        Py_INCREF(words);
        if (is_described)
            keep_line(line, words);
    }
    Py_DECREF(line.code);
    return words;
}

/* RecordedWork(work, layer, number). */
static PyObject *
recorded(PyObject *work, PyObject *layer, long long number)
{
    PyObject *made = classes[WORK].type->tp_alloc(classes[WORK].type, 0), *its = PyLong_FromLongLong(number);
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
