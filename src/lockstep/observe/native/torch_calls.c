/* Calls of the methods of torch's ProcessGroup, and of Work.wait: see `torch_watch.py`.

   For the case that programs are made of: one of torch's own functions calls, from a line that is known, for one tensor,
   in a group whose collectives run on the CPU. */

#include "held.h"

enum { ASKER = 2 };                                       /* frames from torch's function to who has called that */
enum { STEPS, CODE, INSTRUCTION, BELOW, SITE, WAY_SIZE }; /* of a `Way` of `call_site.py` */
enum { BELOW_SIZE = 3 };

/* What functions of `torch_watch.py` hold: both of them; those of ProcessGroup; that of Work. */
enum { RECORDING, OLD, OPENED, SAW };
enum { FOLLOW = SAW + 1, PLAIN, FOLLOWED, DOORS, WAYS, INDEX, REDUCES, HAS_ROOT, READ, NOTING_SIZE };
enum { HAS_WAITED = SAW + 1, LEAVING_SIZE };

static int
can_go_by(PyObject *held, Py_ssize_t size)
{
    return PyTuple_GET_SIZE(held) == size && IS(THEIR(held, RECORDING), RECORDER) && PyDict_CheckExact(THEIR(held, OPENED));
}

int
can_note(PyObject *held)
{
    return can_go_by(held, NOTING_SIZE) && PyDict_CheckExact(THEIR(held, FOLLOWED)) && PySet_Check(THEIR(held, DOORS)) &&
           PyDict_CheckExact(THEIR(held, WAYS)) && PyLong_CheckExact(THEIR(held, INDEX));
}

int
can_leave(PyObject *held)
{
    return can_go_by(held, LEAVING_SIZE);
}

/* ---------------------------------------------------------------- what is asked for, and where */

/* As the group is followed, if a call may begin there: a new reference, or NULL without an error. */
static PyObject *
followed_as(PyObject *held, PyObject *group)
{
    PyObject *id = PyLong_FromVoidPtr(group), *watched = NULL;
    if (id != NULL)
        watched = PyDict_GetItemWithError(THEIR(held, FOLLOWED), id);
    Py_XDECREF(id);
    PyErr_Clear();
    if (!IS(watched, WATCHED) || HELD(watched, WATCHED, G_HAS_STREAMS) != Py_False)
        return NULL;
    return number_in(watched, WATCHED, G_INSIDE) == 0 ? Py_NewRef(watched) : NULL;
}

/* Whether the frame that calls is that of one of torch's functions that users call through a wrapper. */
static int
is_by_door(PyObject *doors)
{
    int32_t instruction;
    PyObject *code = code_at(0, &instruction), *id = code == NULL ? NULL : PyLong_FromVoidPtr(code);
    int is_door = id == NULL ? 0 : PySet_Contains(doors, id);
    Py_XDECREF(id);
    Py_XDECREF(code);
    return is_door > 0;
}

/* What an attribute of the options of a call says; 0 where they have none, as those of the short forms. */
static int
option(PyObject *options, PyObject *name, int is_hash, long long *value)
{
    PyObject *given = PyObject_GetAttr(options, name);
    if (given != NULL)
        *value = is_hash ? PyObject_Hash(given) : PyLong_AsLongLong(given);
    Py_XDECREF(given);
    int is_there = !PyErr_Occurred();
    PyErr_Clear();
    return is_there;
}

/* The line has what is asked for, as `read` finds it for one plain tensor. */
static int
is_described(PyObject *held, PyObject *const *args, Py_ssize_t count, Line *line)
{
    long long index = PyLong_AsLongLong(THEIR(held, INDEX));
    if (index < 0 || count - 1 <= index)
        return 0;
    PyObject *tensor = args[1 + index], *options = args[count - 1];
    if (PyList_CheckExact(tensor) && PyList_GET_SIZE(tensor) == 1)
        tensor = PyList_GET_ITEM(tensor, 0);
    return describe(line, tensor) &&
           (THEIR(held, REDUCES) != Py_True || option(options, name_reduce_op, 1, &line->reduction)) &&
           (THEIR(held, HAS_ROOT) != Py_True || option(options, name_root, 0, &line->root));
}

/* Whether that frame stands there. */
static int
stands_at(long depth, PyObject *code, long instruction)
{
    int32_t at;
    PyObject *there = depth < 0 ? NULL : code_at(depth, &at);
    Py_XDECREF(there);
    return there == code && (instruction < 0 || at == instruction);
}

/* Whether the thread has come that way, as `Way.leads` has it. */
static int
leads(PyObject *way)
{
    if (!PyTuple_Check(way) || PyTuple_GET_SIZE(way) != WAY_SIZE)
        return 0;
    PyObject *below = PyTuple_GET_ITEM(way, BELOW);
    long users = ASKER + PyLong_AsLong(PyTuple_GET_ITEM(way, STEPS));
    int is_there = PyList_Check(below) && PyList_GET_SIZE(below) == BELOW_SIZE &&
                   stands_at(users, PyTuple_GET_ITEM(way, CODE), PyLong_AsLong(PyTuple_GET_ITEM(way, INSTRUCTION)));
    for (long at = 0; is_there && at < BELOW_SIZE; at++)
        is_there = stands_at(users - 1 - at, PyList_GET_ITEM(below, at), -1);
    return is_there;
}

/* The user's line, by a way that is known from `line`, which is torch's: a new reference, or NULL without an error. */
static PyObject *
site_of(PyObject *ways, PyObject *line)
{
    PyObject *known = PyDict_GetItemWithError(ways, line), *site = NULL;
    if (known != NULL && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 2 && PyList_Check(PyTuple_GET_ITEM(known, 1))) {
        PyObject *all = Py_NewRef(PyTuple_GET_ITEM(known, 1));
        for (Py_ssize_t at = 0; site == NULL && at < PyList_GET_SIZE(all); at++) {
            PyObject *way = Py_NewRef(PyList_GET_ITEM(all, at));
            if (leads(way))
                site = Py_NewRef(PyTuple_GET_ITEM(way, SITE));
            Py_DECREF(way);
        }
        Py_DECREF(all);
    }
    PyErr_Clear();
    return site;
}

/* What `read` makes of the call: the fields of an Operation, a new reference. */
static PyObject *
operation_of(PyObject *held, PyObject *const *args, Py_ssize_t count)
{
    PyObject *given = PyTuple_New(count - 1), *names = PyDict_New(), *both = NULL, *operation = NULL;
    for (Py_ssize_t at = 1; given != NULL && at < count; at++)
        PyTuple_SET_ITEM(given, at - 1, Py_NewRef(args[at]));
    if (given != NULL && names != NULL)
        both = PyObject_CallFunctionObjArgs(THEIR(held, READ), given, names, NULL);
    if (both != NULL && PyTuple_Check(both) && PyTuple_GET_SIZE(both) == 2)
        operation = Py_NewRef(PyTuple_GET_ITEM(both, 0));
    Py_XDECREF(both);
    Py_XDECREF(names);
    Py_XDECREF(given);
    return operation;
}

/* What is recorded of the call: a new reference; NULL, maybe with an error, where that is still to be learned. */
static PyObject *
words_of(PyObject *held, PyObject *watched, PyObject *const *args, Py_ssize_t count)
{
    Line line = {.of_lines = HELD(watched, WATCHED, G_OF_LINES), .reduce = held};
    if (!is_by_door(THEIR(held, DOORS)) || !is_described(held, args, count, &line) || !line_at(ASKER, &line))
        return NULL;
    PyObject *words = words_at(&line), *site = NULL, *operation = NULL, *key = NULL;
    PyObject *place = words == NULL ? key_of(line.code, line.instruction) : NULL;
    if (place != NULL && (site = site_of(THEIR(held, WAYS), place)) != NULL) {
        Py_SETREF(line.code, Py_NewRef(site)); /* the call goes by that, from whatever line of torch's */
        line.instruction = -1;
        words = words_at(&line);
    }
    if (words == NULL && place != NULL && (operation = operation_of(held, args, count)) != NULL) {
        PyObject *known = HELD(watched, WATCHED, site != NULL ? G_OF_SITES : G_OF_LINES);
        key = site != NULL ? PyTuple_Pack(2, site, operation)
                           : PyTuple_Pack(3, PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1), operation);
        words = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(known, key));
        if (words != NULL)
            keep_line(line, words);
    }
    Py_XDECREF(key);
    Py_XDECREF(operation);
    Py_XDECREF(site);
    Py_XDECREF(place);
    Py_DECREF(line.code);
    return words;
}

/* ---------------------------------------------------------------- ProcessGroup.allreduce, and others */

/* One call more, or less, is inside of the group. */
static void
add_inside(PyObject *watched, long more)
{
    PyObject *inside = PyLong_FromLongLong(number_in(watched, WATCHED, G_INSIDE) + more);
    if (inside != NULL)
        hold(watched, WATCHED, G_INSIDE, inside);
}

/* The program sees an error, which is set, and is so again unless `saw` raises another one. */
void
tell(PyObject *saw)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *done = PyObject_CallOneArg(saw, error);
    if (done != NULL) {
        PyErr_Restore(type, error, traceback);
        Py_DECREF(done);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* Its wait will say when it ended; -1 with an error. */
static int
open(PyObject *held, PyObject *watched, PyObject *work, PyObject *number)
{
    PyObject *opened = THEIR(held, OPENED), *id = PyLong_FromVoidPtr(work), *done, *known = NULL;
    int failed = id == NULL ? -1 : 0;
    if (!failed && work != Py_None)
        known = PyDict_GetItemWithError(opened, id);
    if (!failed && (work == Py_None || known != NULL)) { /* the latter of one that is gone */
        done = PyObject_CallFunctionObjArgs(THEIR(held, FOLLOW), watched, number, work, Py_None, Py_False, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    } else if (!failed && !PyErr_Occurred()) {
        PyObject *weak = PyWeakref_NewRef(work, NULL), *seen = Py_NewRef(HELD(watched, WATCHED, G_SEEN));
        PyObject *call = weak == NULL ? NULL : PyTuple_Pack(4, number, watched, weak, seen);
        failed = call == NULL ? -1 : PyDict_SetItem(opened, id, call);
        Py_XDECREF(call);
        Py_DECREF(seen);
        Py_XDECREF(weak);
    }
    Py_XDECREF(id);
    return PyErr_Occurred() ? -1 : failed;
}

/* It is entered: have it done. */
static PyObject *
carry_out(PyObject *held, PyObject *watched, PyObject *const *args, Py_ssize_t count, long long number)
{
    PyObject *recorder = THEIR(held, RECORDING), *type, *error, *traceback, *after = NULL;
    PyObject *work = PyObject_Vectorcall(THEIR(held, OLD), args, count, NULL);
    if (work == NULL) {
        leave(recorder, number, now());
        tell(THEIR(held, SAW));
    }
    PyErr_Fetch(&type, &error, &traceback);
    if (number_in(watched, WATCHED, G_INSIDE) == 1 && (after = PyObject_CallMethodNoArgs(args[0], name_sequence)) != NULL)
        hold(watched, WATCHED, G_SEEN, after);
    if (type != NULL)
        PyErr_Restore(type, error, traceback); /* in the place of another one */
    PyObject *its = work == NULL || PyErr_Occurred() ? NULL : PyLong_FromLongLong(number);
    if (work != NULL && (its == NULL || open(held, watched, work, its) < 0))
        Py_CLEAR(work);
    Py_XDECREF(its);
    return work;
}

PyObject *
quick_noting(PyObject *held, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *recorder = THEIR(held, RECORDING), *watched, *words, *before, *answer = DECLINED;
    if (names != NULL || count < 2 || (PyObject *)Py_TYPE(args[0]) != THEIR(held, PLAIN))
        return DECLINED;
    if (!can_stand(recorder) || (watched = followed_as(held, args[0])) == NULL)
        return DECLINED;
    if ((words = words_of(held, watched, args, count)) == NULL) {
        Py_DECREF(watched);
        return PyErr_Occurred() ? NULL : DECLINED;
    }
    add_inside(watched, 1); /* from here on nobody else enters what the group has started */
    int is_alone = number_in(watched, WATCHED, G_INSIDE) == 1, is_last = 0;
    if (is_alone && (before = PyObject_CallMethodNoArgs(args[0], name_sequence)) != NULL) {
        is_last = PyObject_RichCompareBool(before, HELD(watched, WATCHED, G_SEEN), Py_EQ);
        Py_DECREF(before);
    }
    PyErr_Clear(); /* Python comes to the same */
    if (is_last > 0 && can_enter(recorder, words)) {
        long long seq = next_of(HELD(watched, WATCHED, G_COLLECTIVES));
        long long number = seq < 0 ? -1 : enter(recorder, seq, words, 0, 0);
        answer = number < 0 ? NULL : carry_out(held, watched, args, count, number);
    }
    add_inside(watched, -1);
    Py_DECREF(words);
    Py_DECREF(watched);
    return answer;
}

/* ---------------------------------------------------------------- Work.wait */

static unsigned long standing_thread; /* which is in such a wait; 0: none */

PyObject *
standing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromUnsignedLong(standing_thread);
}

/* The call that has returned this very Work: a new reference, or NULL without an error. */
static PyObject *
call_of(PyObject *opened, PyObject *work)
{
    PyObject *id = PyLong_FromVoidPtr(work), *call = id == NULL ? NULL : PyDict_GetItemWithError(opened, id);
    Py_XDECREF(id);
    int is_call = call != NULL && PyTuple_CheckExact(call) && PyTuple_GET_SIZE(call) == 4;
    PyObject *its = is_call ? PyObject_CallNoArgs(PyTuple_GET_ITEM(call, 2)) : NULL; /* a weak reference */
    call = its == work && PyLong_AsLongLong(PyTuple_GET_ITEM(call, 3)) >= 0 ? Py_NewRef(call) : NULL;
    Py_XDECREF(its);
    PyErr_Clear();
    return call;
}

/* It has ended; -1 with an error. */
static int
closed(PyObject *held, PyObject *work, PyObject *call, int64_t since_ns)
{
    PyObject *opened = THEIR(held, OPENED), *id = PyLong_FromVoidPtr(work);
    int failed = id == NULL ? -1 : 0;
    if (!failed && PyDict_GetItemWithError(opened, id) == call) {
        long long number = PyLong_AsLongLong(PyTuple_GET_ITEM(call, 0));
        failed = PyDict_DelItem(opened, id) < 0 ? -1 : stood(THEIR(held, RECORDING), number, since_ns, 0);
    } else if (!failed && !PyErr_Occurred()) { /* a look has seen it ending first */
        PyObject *since = PyLong_FromLongLong(since_ns), *done = NULL;
        if (since != NULL)
            done = PyObject_CallFunctionObjArgs(THEIR(held, HAS_WAITED), work, since, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
        Py_XDECREF(since);
    }
    Py_XDECREF(id);
    return failed;
}

PyObject *
quick_leaving(PyObject *held, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *recorder = THEIR(held, RECORDING), *call, *type, *error, *traceback;
    if (names != NULL || count != 1 || !can_stand(recorder) || (call = call_of(THEIR(held, OPENED), args[0])) == NULL)
        return DECLINED;
    int64_t since_ns = now();
    unsigned long before = standing_thread;
    standing_thread = PyThread_get_thread_ident();
    PyObject *done = PyObject_Vectorcall(THEIR(held, OLD), args, 1, NULL);
    standing_thread = before;
    if (done == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError))
        tell(THEIR(held, SAW));
    PyErr_Fetch(&type, &error, &traceback);
    if (closed(held, args[0], call, since_ns) < 0)
        Py_CLEAR(done);
    if (type != NULL)
        PyErr_Restore(type, error, traceback); /* in the place of another one */
    Py_DECREF(call);
    return done;
}
