/* The marks of a step, and the end of one that is only counted: see `step_clock.py` and `step_ends.py`. */

#include "held.h"

enum { DATA = 0 };       /* of `phases.py` */
enum { LEFT_MAX = 256 }; /* of `step_ends.py`; and what `Account` keeps */

/* ---------------------------------------------------------------- StepClock.switch */

PyObject *
quick_switch(PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !is_timed(args[0]) || !PyLong_CheckExact(args[1]) || !is_owner(args[0], CLOCK, C_OWNER))
        return DECLINED;
    PyObject *marks = HELD(args[0], CLOCK, C_MARKS), *is_brief = HELD(args[0], CLOCK, C_IS_BRIEF);
    if (marks == NULL || !PyList_CheckExact(marks)) /* those of a stream are a list of another class */
        return DECLINED;
    Py_ssize_t size = PyList_GET_SIZE(marks);
    if (size < 1 || size >= LISTED_MAX - 1 || !PyTuple_Check(PyList_GET_ITEM(marks, size - 1)))
        return DECLINED;
    PyObject *before = PyTuple_GET_ITEM(PyList_GET_ITEM(marks, size - 1), 0);
    long phase = PyLong_AsLong(args[1]);
    if (phase < 0 || (is_brief == Py_True && phase != DATA && PyLong_AsLong(before) != DATA))
        return PyErr_Occurred() ? NULL : PyLong_FromLong(-1);
    Py_INCREF(before);
    Py_INCREF(marks);
    PyObject *now_ns = PyLong_FromLongLong(now()), *mark = now_ns == NULL ? NULL : PyTuple_Pack(2, args[1], now_ns);
    if (mark == NULL || PyList_Append(marks, mark) < 0)
        Py_CLEAR(before);
    Py_XDECREF(mark);
    Py_XDECREF(now_ns);
    Py_DECREF(marks);
    return before;
}

/* ---------------------------------------------------------------- Passing.passed */

/* Whether it is a list of so many at most. */
static int
has_at_most(PyObject *list, Py_ssize_t most)
{
    return list != NULL && PyList_CheckExact(list) && PyList_GET_SIZE(list) <= most;
}

/* Whether torch may be computing on CUDA in this process. */
static int
uses_cuda(void)
{
    static PyObject *known;
    PyObject *cuda = held_by(name_cuda, &known);
    PyObject *is_initialized = cuda == NULL ? Py_False : PyDict_GetItemWithError(cuda, name_initialized);
    PyErr_Clear();
    return is_initialized != Py_False;
}

/* Whether a step that is looked at closely is one that its own program has marked, and of the CPU alone. */
static int
is_plain(PyObject *clock)
{
    PyObject *marks = HELD(clock, CLOCK, C_MARKS), *waits = HELD(clock, CLOCK, C_WAITS);
    if (HELD(clock, CLOCK, C_GPU) != Py_None || HELD(clock, CLOCK, C_VALUES) != Py_None || uses_cuda())
        return 0;
    return PyList_CheckExact(marks) && waits != NULL && PyList_CheckExact(waits) &&
           HELD(clock, CLOCK, C_BEGINS_WITH_MARK) == Py_False;
}

/* Whether nothing is in the way of it. Nothing is called for that: what a step has left cold costs a microsecond. */
static int
is_clear(PyObject *self, PyObject *clock)
{
    PyObject *lookout = HELD(self, PASSING, P_LOOKOUT), *followed = HELD(self, PASSING, P_FOLLOWED);
    PyObject *summed_ns = HELD(clock, CLOCK, C_SUMMED_NS);
    if (!IS(lookout, LOOKOUT) || HELD(lookout, LOOKOUT, O_FINDING) != Py_None || !IS(HELD(self, PASSING, P_ENDS), ENDS))
        return 0;
    if (summed_ns == NULL || !PyTuple_CheckExact(summed_ns) || PyTuple_GET_SIZE(summed_ns) != 0)
        return 0;
    if (followed == NULL || !PyList_CheckExact(followed) || !has_at_most(HELD(self, PASSING, P_ACTIVITIES), 0))
        return 0;
    if (!has_at_most(HELD(self, PASSING, P_LEFT), LEFT_MAX) || !has_at_most(HELD(self, PASSING, P_ENDED_NS), LEFT_MAX - 1))
        return 0;
    if (!has_at_most(HELD(clock, CLOCK, C_LEFT), LISTED_MAX - 1) || HELD(clock, CLOCK, C_MARKS) == NULL ||
        HELD(clock, CLOCK, C_REST) == NULL)
        return 0;
    return HELD(clock, CLOCK, C_IS_BRIEF) == Py_True || is_plain(clock);
}

/* Append what C++ has started in one group, if anything; 0 where it is gone, or the line is to be looked for. */
static int
add_started(PyObject *started, PyObject *pair, PyObject *site)
{
    PyObject *watched = PyTuple_GET_ITEM(pair, 0), *group = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 1));
    PyObject *inside = group == NULL ? NULL : PyObject_GetAttr(watched, name_inside), *number = NULL, *seen = NULL;
    int is_well = -1, is_inside = inside == NULL ? -1 : PyObject_IsTrue(inside);
    if (is_inside >= 0 && group == Py_None) {
        is_well = 0;
    } else if (is_inside > 0) {
        is_well = 1;
    } else if (is_inside == 0 && (number = PyObject_CallMethodNoArgs(group, name_sequence)) != NULL) {
        seen = PyObject_GetAttr(watched, name_seen);
        int is_new = seen == NULL ? -1 : PyObject_RichCompareBool(number, seen, Py_NE);
        is_well = is_new == 0 ? 1 : is_new < 0 ? -1 : PyObject_IsTrue(site);
        PyObject *one = is_new == 1 && is_well == 1 ? PyTuple_Pack(3, watched, number, site) : NULL;
        if (is_new == 1 && is_well == 1 && (one == NULL || PyList_Append(started, one) < 0))
            is_well = -1;
        Py_XDECREF(one);
    }
    Py_XDECREF(seen);
    Py_XDECREF(number);
    Py_XDECREF(inside);
    Py_XDECREF(group);
    return is_well;
}

/* As StepClock.keep; -1 with an error. */
static int
keep(PyObject *clock, PyObject *ended, PyObject *operations, PyObject *tokens)
{
    int failed = 0;
    if (HELD(clock, CLOCK, C_CLOSE_READER) != Py_None) {
        PyObject *both = PyTuple_Pack(2, HELD(clock, CLOCK, C_FIRST), operations);
        PyObject *left = both == NULL ? NULL : PyTuple_Pack(3, ended, both, tokens);
        failed = left == NULL ? -1 : PyList_Append(HELD(clock, CLOCK, C_LEFT), left);
        Py_XDECREF(left);
        Py_XDECREF(both);
    }
    hold(clock, CLOCK, C_FIRST, Py_NewRef(operations));
    return failed;
}

/* The step that ends has become `ended`, at `now_ns`: what is left to be done of it. -1 with an error. */
static int
take_up(PyObject *self, PyObject *step, PyObject *now_ns, PyObject *ended, PyObject *started, PyObject *tokens)
{
    PyObject *recorder = HELD(self, PASSING, P_RECORDER), *left = HELD(self, PASSING, P_LEFT);
    if (PyList_GET_SIZE(started) || PyList_GET_SIZE(left)) {
        PyObject *args[] = {HELD(self, PASSING, P_TAKE_UP), step, now_ns, ended, started, tokens};
        PyObject *later = PyObject_Vectorcall(partial, args, 6, NULL);
        int failed = later == NULL ? -1 : PyList_Append(left, later);
        Py_XDECREF(later);
        return failed;
    }
    if (PyList_Append(HELD(self, PASSING, P_ENDED_NS), now_ns) < 0)
        return -1;
    PyObject *operations = Py_NewRef(HELD(recorder, RECORDER, R_STARTED));
    hold(HELD(self, PASSING, P_ENDS), ENDS, E_OPERATIONS, Py_NewRef(operations));
    int failed = keep(HELD(recorder, RECORDER, R_CLOCK), ended, operations, tokens);
    Py_DECREF(operations);
    return failed;
}

/* A step of this number ends, that of the program is `named`: `step` again, or NULL with an error. */
static PyObject *
pass(PyObject *self, PyObject *step, PyObject *named, PyObject *started, PyObject *tokens)
{
    PyObject *recorder = HELD(self, PASSING, P_RECORDER), *clock = HELD(recorder, RECORDER, R_CLOCK);
    PyObject *now_ns = PyLong_FromLongLong(now()), *none = PyLong_FromLong(0);
    PyObject *mark = now_ns == NULL ? NULL : PyTuple_Pack(2, HELD(clock, CLOCK, C_REST), now_ns);
    PyObject *marks = mark == NULL ? NULL : PyList_New(0);
    if (marks != NULL && PyList_Append(marks, mark) < 0)
        Py_CLEAR(marks);
    int is_brief = HELD(clock, CLOCK, C_IS_BRIEF) == Py_True;
    PyObject *waits = is_brief ? nothing : HELD(clock, CLOCK, C_WAITS), *next = is_brief ? NULL : PyList_New(0);
    PyObject *ended = marks == NULL ? NULL
                                    : PyTuple_Pack(9, named, HELD(clock, CLOCK, C_BEGAN_NS), now_ns,
                                                   HELD(clock, CLOCK, C_SAMPLES), waits, HELD(clock, CLOCK, C_MARKS),
                                                   nothing, Py_None, is_brief ? Py_True : Py_False);
    int failed = ended == NULL || none == NULL || (next == NULL && !is_brief);
    if (!failed) {
        if (!is_brief)
            hold(clock, CLOCK, C_WAITS, Py_NewRef(next));
        hold(clock, CLOCK, C_STEP, Py_NewRef(named));
        hold(clock, CLOCK, C_BEGAN_NS, Py_NewRef(now_ns));
        hold(clock, CLOCK, C_SAMPLES, Py_NewRef(none));
        hold(clock, CLOCK, C_MARKS, Py_NewRef(marks));
        failed = take_up(self, step, now_ns, ended, started, tokens) < 0;
        set_step(recorder, step);
    }
    Py_XDECREF(next);
    Py_XDECREF(ended);
    Py_XDECREF(marks);
    Py_XDECREF(mark);
    Py_XDECREF(none);
    Py_XDECREF(now_ns);
    return failed ? NULL : Py_NewRef(step);
}

PyObject *
quick_passed(PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !IS(args[0], PASSING) || !PyLong_CheckExact(args[2]))
        return DECLINED;
    PyObject *self = args[0], *recorder = HELD(self, PASSING, P_RECORDER), *answer = DECLINED;
    PyObject *clock = recorder != NULL && IS(recorder, RECORDER) ? HELD(recorder, RECORDER, R_CLOCK) : NULL;
    if (clock == NULL || !IS(clock, CLOCK) || !is_owner(clock, CLOCK, C_OWNER))
        return DECLINED;
    int is_well = is_clear(self, clock);
    PyObject *started = is_well == 1 ? PyList_New(0) : NULL, *followed = HELD(self, PASSING, P_FOLLOWED);
    if (is_well == 1 && started == NULL)
        is_well = -1;
    for (Py_ssize_t at = 0; is_well == 1 && at < PyList_GET_SIZE(followed); at++)
        is_well = add_started(started, PyList_GET_ITEM(followed, at), args[1]);
    if (is_well == 1) {
        PyObject *step = PyLong_FromLongLong(number_in(recorder, RECORDER, R_STEP) + 1);
        int is_named = PyObject_IsTrue(args[2]);
        answer = step == NULL ? NULL : pass(self, step, is_named ? args[2] : step, started, args[3]);
        Py_XDECREF(step);
    }
    Py_XDECREF(started);
    return is_well < 0 ? NULL : answer;
}
