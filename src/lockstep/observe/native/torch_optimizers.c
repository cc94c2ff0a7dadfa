/* Every optimizer's step in a loop that marks its own phases: see `torch_optimizers.py`. */

#include "held.h"

enum { OTHER = 5 }; /* of `phases.py` */

/* The gradients are to be looked at, or it is not known whether they are sound; then Python looks. */
static int
is_due(PyObject *looks, PyObject *backwards)
{
    PyObject *due = HELD(looks, GRADIENTS, F_DUE_NS);
    double due_ns = due == NULL ? 0 : PyFloat_AsDouble(due);
    PyErr_Clear();
    return (double)now() >= due_ns || HELD(backwards, BACKWARDS, B_IS_SOUND) != Py_True;
}

/* What is kept of this step until the gradients of one are looked at: a new reference. */
static PyObject *
seen_in(PyObject *looks, PyObject *backwards)
{
    PyObject *own = PySequence_List(HELD(backwards, BACKWARDS, B_OWN)), *applied = PyList_New(0), *seen = NULL;
    if (own != NULL && applied != NULL) {
        PyObject *step = HELD(HELD(looks, GRADIENTS, F_RECORDER), RECORDER, R_STEP);
        seen = PyTuple_Pack(4, step, HELD(backwards, BACKWARDS, B_RECENT), own, applied);
    }
    Py_XDECREF(applied);
    Py_XDECREF(own);
    return seen;
}

PyObject *
quick_begins(PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !IS(args[0], OPTIMIZERS) || HELD(args[0], OPTIMIZERS, Z_PHASES) != Py_None)
        return DECLINED;
    PyObject *begun = HELD(args[0], OPTIMIZERS, Z_BEGUN), *looks = HELD(args[0], OPTIMIZERS, Z_LOOKS);
    PyObject *backwards = HELD(args[0], OPTIMIZERS, Z_BACKWARDS), *done = NULL;
    if (!IS(looks, GRADIENTS) || !IS(HELD(looks, GRADIENTS, F_RECORDER), RECORDER) || !IS(backwards, BACKWARDS) ||
        begun == NULL || !PyDict_CheckExact(begun) || is_due(looks, backwards))
        return DECLINED;
    PyObject *id = PyLong_FromVoidPtr(args[1]), *other = PyLong_FromLong(OTHER), *none = PyList_New(0);
    PyObject *seen = id != NULL && other != NULL && none != NULL ? seen_in(looks, backwards) : NULL;
    if (seen != NULL && PyDict_SetDefault(begun, id, other) != NULL &&
        (done = PyObject_CallMethodOneArg(HELD(looks, GRADIENTS, F_SEEN), name_append, seen)) != NULL) {
        hold(args[0], OPTIMIZERS, Z_IS_UNSEEN, Py_NewRef(Py_False));
        hold(backwards, BACKWARDS, B_RECENT, Py_NewRef(none));
        hold(backwards, BACKWARDS, B_IS_SOUND, Py_NewRef(Py_None));
        Py_SETREF(done, PyObject_CallMethodNoArgs(HELD(backwards, BACKWARDS, B_OWN), name_clear)); /* None */
    }
    Py_XDECREF(seen);
    Py_XDECREF(none);
    Py_XDECREF(other);
    Py_XDECREF(id);
    return done;
}

PyObject *
quick_ends(PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !IS(args[0], OPTIMIZERS))
        return DECLINED;
    PyObject *begun = HELD(args[0], OPTIMIZERS, Z_BEGUN), *steps = HELD(args[0], OPTIMIZERS, Z_STEPS);
    PyObject *clock = IS(steps, TORCH_STEPS) ? HELD(steps, TORCH_STEPS, T_CLOCK) : NULL;
    if (!IS(clock, CLOCK) || HELD(clock, CLOCK, C_IS_MARKED) != Py_True || begun == NULL || !PyDict_CheckExact(begun))
        return DECLINED;
    PyObject *id = PyLong_FromVoidPtr(args[1]);
    int has_begun = id == NULL ? -1 : PyDict_Contains(begun, id);
    PyObject *weak = has_begun > 0 ? PyWeakref_NewRef(args[1], NULL) : NULL, *done = has_begun == 0 ? DECLINED : NULL;
    if (weak != NULL && PyDict_DelItem(begun, id) == 0) {
        hold(args[0], OPTIMIZERS, Z_MARKED, Py_NewRef(weak));
        done = Py_NewRef(Py_None);
    }
    Py_XDECREF(weak);
    Py_XDECREF(id);
    return done;
}
