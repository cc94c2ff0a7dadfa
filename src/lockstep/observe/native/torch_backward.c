/* Every backward of the program: see `torch_backward.py`. For a loss of one finite number on the CPU. */

#include "held.h"

enum { KEPT = 256 }; /* of `torch_backward.py` */
enum { OLD, METHOD, OURS, LAST_SITE, SITES, PLAIN, PACE, HELD_SIZE }; /* what the function there holds */

int
can_see(PyObject *held)
{
    PyObject *last_site = PyTuple_GET_SIZE(held) == HELD_SIZE ? THEIR(held, LAST_SITE) : NULL;
    return last_site != NULL && PyList_CheckExact(last_site) && PyList_GET_SIZE(last_site) == 1 &&
           PyDict_CheckExact(THEIR(held, SITES)) && IS(THEIR(held, OURS), BACKWARDS) && IS(THEIR(held, PACE), PACER);
}

/* Whether nothing waits for this backward, and it is the one that torch calls. */
static int
is_as_usual(PyObject *held, PyObject *ours)
{
    PyObject *once = HELD(ours, BACKWARDS, B_ONCE), *places = HELD(ours, BACKWARDS, B_PLACES);
    return once != NULL && PyList_CheckExact(once) && PyList_GET_SIZE(once) == 0 &&
           HELD(ours, BACKWARDS, B_SCALED) == Py_None && places != NULL && PyTuple_CheckExact(places) &&
           PyTuple_GET_SIZE(places) == 3 && is_held_by(PyTuple_GET_ITEM(places, 1), held);
}

/* What the loss is: a new reference, or NULL without an error where it is no such number. */
static PyObject *
value_of(PyObject *loss)
{
    PyObject *is_cpu = PyObject_GetAttr(loss, name_is_cpu), *size = NULL, *value = NULL;
    if (is_cpu == Py_True)
        size = PyObject_CallMethodNoArgs(loss, name_numel);
    if (size != NULL && PyLong_AsLongLong(size) == 1)
        value = PyObject_CallMethodNoArgs(loss, name_item);
    if (value != NULL && !(PyFloat_CheckExact(value) && isfinite(PyFloat_AS_DOUBLE(value))))
        Py_CLEAR(value);
    Py_XDECREF(size);
    Py_XDECREF(is_cpu);
    PyErr_Clear(); /* Python comes to the same */
    return value;
}

/* The user's line, if it is known: a new reference, or NULL without an error. */
static PyObject *
users_line(PyObject *held)
{
    int32_t instruction, above;
    PyObject *code = code_at(0, &instruction), *key = NULL, *known = NULL, *site = NULL;
    PyObject *caller = code != NULL && code == THEIR(held, METHOD) ? code_at(1, &above) : NULL;
    if (caller != NULL) { /* as a rule of Tensor.backward */
        Py_SETREF(code, caller);
        instruction = above;
    }
    if (code != NULL)
        key = key_of(code, instruction);
    if (key != NULL)
        known = PyDict_GetItemWithError(THEIR(held, SITES), key);
    if (known != NULL && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 3 && PyTuple_GET_ITEM(known, 2) == Py_True)
        site = Py_NewRef(PyTuple_GET_ITEM(known, 1));
    Py_XDECREF(key);
    Py_XDECREF(code);
    PyErr_Clear();
    return site;
}

/* Keep it with others, if there are not too many; -1 with an error. */
static int
keep(PyObject *others, PyObject *loss)
{
    return PyList_GET_SIZE(others) < KEPT ? PyList_Append(others, loss) : 0;
}

/* The loss of a step that is looked at closely is known; 0 where Python is to do it, -1 with an error. */
static int
note(PyObject *held, PyObject *ours, PyObject *value)
{
    PyObject *losses = HELD(ours, BACKWARDS, B_LOSSES), *recent = HELD(ours, BACKWARDS, B_RECENT), *site, *loss;
    if (HELD(ours, BACKWARDS, B_PHASES) != Py_None || !PyList_CheckExact(losses) || !PyList_CheckExact(recent))
        return 0;
    if ((site = users_line(held)) == NULL)
        return 0;
    int is_well = (loss = PyTuple_Pack(2, value, site)) != NULL && keep(losses, loss) == 0 && keep(recent, loss) == 0;
    Py_XDECREF(loss);
    if (HELD(ours, BACKWARDS, B_IS_SOUND) != Py_False)
        hold(ours, BACKWARDS, B_IS_SOUND, Py_NewRef(Py_True));
    hold(ours, BACKWARDS, B_STEP_SITE, Py_NewRef(site));
    PyList_SetItem(THEIR(held, LAST_SITE), 0, site);
    return is_well ? 1 : -1;
}

PyObject *
quick_backward(PyObject *held, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *ours = THEIR(held, OURS), *value;
    if (count < 1 || (PyObject *)Py_TYPE(args[0]) != THEIR(held, PLAIN) || !is_as_usual(held, ours))
        return DECLINED;
    if ((value = value_of(args[0])) == NULL)
        return DECLINED;
    int is_noted = 1;
    if (HELD(THEIR(held, PACE), PACER, E_IS_BRIEF) == Py_True)
        hold(ours, BACKWARDS, B_STEP_SITE, Py_NewRef(PyList_GET_ITEM(THEIR(held, LAST_SITE), 0)));
    else
        is_noted = note(held, ours, value);
    Py_DECREF(value);
    if (is_noted <= 0)
        return is_noted < 0 ? NULL : DECLINED;
    PyObject *done = PyObject_Vectorcall(THEIR(held, OLD), args, count, names);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError))
        tell(HELD(ours, BACKWARDS, B_FAILED));
    return done;
}
