/* What a step is made of, added up: see `phases.py`. Not in the way of a step, but the marks and waits are many. */

#include "held.h"

enum { EXPOSED = 3, PHASES = 6 }; /* of `phases.py` */

/* The number at this place of the tuple at that one of a list; -1 with an error set where there is none. */
static int64_t
number_at(PyObject *list, Py_ssize_t at, Py_ssize_t place)
{
    PyObject *tuple = PyList_GET_ITEM(list, at);
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) <= place) {
        PyErr_SetString(PyExc_TypeError, "no mark, and no wait");
        return -1;
    }
    return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place));
}

/* Declined, if reading has failed: the method says what is wrong. */
static int
has_failed(void)
{
    int failed = PyErr_Occurred() != NULL;
    PyErr_Clear();
    return failed;
}

/* ---------------------------------------------------------------- outermost */

PyObject *
quick_outermost(PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyLong_CheckExact(args[1]))
        return DECLINED;
    PyObject *waits = args[0], *found = PyList_New(0);
    int64_t since_ns = PyLong_AsLongLong(args[1]);
    int is_well = found != NULL;
    for (Py_ssize_t at = 0; is_well && at < PyList_GET_SIZE(waits); at++) {
        int64_t began_ns = number_at(waits, at, 1), ended_ns = number_at(waits, at, 2);
        Py_ssize_t size = PyList_GET_SIZE(found);
        while (size > 0 && number_at(found, size - 1, 1) >= began_ns)
            size--;
        is_well = !PyErr_Occurred() && PyList_SetSlice(found, size, PyList_GET_SIZE(found), NULL) == 0;
        if (!is_well || ended_ns <= since_ns)
            continue;
        PyObject *wait = PyList_GET_ITEM(waits, at);
        PyObject *kept = began_ns >= since_ns ? Py_NewRef(wait)
                                              : PyTuple_Pack(3, PyTuple_GET_ITEM(wait, 0), args[1], PyTuple_GET_ITEM(wait, 2));
        is_well = kept != NULL && PyList_Append(found, kept) == 0;
        Py_XDECREF(kept);
    }
    if (is_well && !has_failed())
        return found;
    PyErr_Clear();
    Py_XDECREF(found);
    return DECLINED;
}

/* ---------------------------------------------------------------- sums_of */

PyObject *
quick_sums_of(PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) || PyList_GET_SIZE(args[0]) == 0)
        return DECLINED;
    PyObject *marks = args[0], *waits = args[1];
    Py_ssize_t last = PyList_GET_SIZE(marks) - 1, at = 0;
    int64_t spent[PHASES] = {0}, now_ns = number_at(marks, 0, 1), ended_ns = PyLong_AsLongLong(args[2]);
    for (Py_ssize_t mark = 0; mark <= last; mark++) {
        int64_t phase = number_at(marks, mark, 0), until_ns = mark < last ? number_at(marks, mark + 1, 1) : ended_ns;
        if (phase < 0 || phase >= PHASES || has_failed())
            return PyErr_Clear(), DECLINED;
        spent[phase] += until_ns - now_ns;
        now_ns = until_ns;
    }
    for (Py_ssize_t wait = 0; wait < PyList_GET_SIZE(waits); wait++) {
        int64_t from_ns = number_at(waits, wait, 1), to_ns = number_at(waits, wait, 2);
        spent[EXPOSED] += to_ns - from_ns;
        while (at < last && number_at(marks, at + 1, 1) <= from_ns)
            at++;
        while (at < last && number_at(marks, at + 1, 1) < to_ns) { /* the thread has changed its phase meanwhile */
            now_ns = number_at(marks, at + 1, 1);
            spent[number_at(marks, at, 0)] -= now_ns - from_ns;
            at++;
            from_ns = now_ns;
        }
        spent[number_at(marks, at, 0)] -= to_ns - from_ns;
    }
    if (has_failed())
        return DECLINED;
    PyObject *sums = PyTuple_New(PHASES);
    for (int phase = 0; sums != NULL && phase < PHASES; phase++) {
        PyObject *sum = PyLong_FromLongLong(spent[phase]);
        if (sum == NULL)
            Py_CLEAR(sums);
        else
            PyTuple_SET_ITEM(sums, phase, sum);
    }
    return sums;
}
