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

/* ---------------------------------------------------------------- Optimizers.step_done */

static PyObject *
nobody(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    Py_RETURN_NONE;
}

static PyMethodDef nobody_method = {"nobody", nobody, METH_NOARGS, NULL};

/* Whether the guard is "on", so that later steps may only be counted. */
static int
is_paced(PyObject *guard)
{
    PyObject *settings = guard == NULL ? NULL : PyObject_GetAttr(guard, name_settings);
    PyObject *mode = settings == NULL ? NULL : PyObject_GetAttr(settings, name_mode);
    int is_on = mode != NULL && PyUnicode_Check(mode) && PyUnicode_CompareWithASCIIString(mode, "on") == 0;
    Py_XDECREF(mode);
    Py_XDECREF(settings);
    PyErr_Clear();
    return is_on;
}

/* As `Pace.plan`, where it is one of those at first, after which no other is planned; whether it is. */
static int
is_one_of_the_first(PyObject *step)
{
    static PyObject *known;
    PyObject *module = held_by(name_pace, &known);
    PyObject *pace = module == NULL ? NULL : PyDict_GetItemWithError(module, name_pacer);
    PyObject *first = module == NULL ? NULL : PyDict_GetItemWithError(module, name_first);
    long long seen = IS(pace, PACER) ? number_in(pace, PACER, E_SEEN) : -1, most = first == NULL ? 0 : PyLong_AsLongLong(first);
    PyErr_Clear();
    if (seen < 0 || step == NULL || seen + 1 >= most)
        return 0;
    PyObject *now_ns = PyLong_FromLongLong(now()), *planned = now_ns == NULL ? NULL : PyTuple_Pack(2, step, now_ns);
    PyObject *more = planned == NULL ? NULL : PyLong_FromLongLong(seen + 1);
    if (more != NULL) {
        hold(pace, PACER, E_PLANNED, Py_NewRef(planned));
        hold(pace, PACER, E_SEEN, Py_NewRef(more));
    }
    int is_well = more != NULL;
    Py_XDECREF(more);
    Py_XDECREF(planned);
    Py_XDECREF(now_ns);
    PyErr_Clear();
    return is_well;
}

/* As `TorchSteps.plan`: a new reference, or NULL with an error. */
static PyObject *
plan(PyObject *steps)
{
    PyObject *recorder = HELD(steps, TORCH_STEPS, T_RECORDER);
    if (!IS(recorder, RECORDER) || !is_paced(HELD(steps, TORCH_STEPS, T_GUARD)) ||
        !is_one_of_the_first(HELD(recorder, RECORDER, R_STEP)))
        return PyObject_CallMethodNoArgs(steps, name_plan);
    return PyObject_SetAttr(steps, name_has_counted, Py_True) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
quick_step_done(PyObject *const *args, Py_ssize_t count)
{
    PyObject *steps = count == 1 && IS(args[0], OPTIMIZERS) ? HELD(args[0], OPTIMIZERS, Z_STEPS) : NULL;
    PyObject *clock = IS(steps, TORCH_STEPS) ? HELD(steps, TORCH_STEPS, T_CLOCK) : NULL;
    PyObject *marked = clock == NULL ? NULL : HELD(args[0], OPTIMIZERS, Z_MARKED);
    PyObject *none = marked == NULL ? NULL : PyCFunction_New(&nobody_method, NULL), *done = NULL;
    if (none == NULL || !IS(clock, CLOCK) || HELD(clock, CLOCK, C_IS_MARKED) != Py_True) {
        Py_XDECREF(none);
        PyErr_Clear();
        return DECLINED;
    }
    PyObject *optimizer = PyObject_CallNoArgs(marked), *counted = HELD(args[0], OPTIMIZERS, Z_COUNTED);
    hold(args[0], OPTIMIZERS, Z_MARKED, none);
    Py_INCREF(steps);
    if (optimizer != NULL && optimizer != Py_None && counted != NULL && counted != Py_None) {
        Py_INCREF(counted);
        PyObject *told = PyObject_CallFunctionObjArgs(counted, optimizer, Py_True, NULL);
        Py_DECREF(counted);
        done = told == NULL ? NULL : plan(steps);
        Py_XDECREF(told);
    } else if (optimizer != NULL) {
        done = plan(steps);
    }
    Py_DECREF(steps);
    Py_XDECREF(optimizer);
    return done;
}
