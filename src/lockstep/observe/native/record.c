/* The record of a rank: see `flight.py`. */

#include "held.h"
#include <time.h>

/* The file of a record as `flight.py` has it. */
enum { STEP_AT = 8 * 5, COUNT_AT = 8 * 7, RING_AT = 64 << 10, RECORDS = 2048, RECORD_BYTES = 256, WORDS_BYTES = 206 };
enum { NUMBER, SEQ, STEP, ENTERED, LEFT, DIGEST, FIELDS }; /* of a record, eight bytes each; then is_message, words */

/* What a module holds, once it has been imported; NULL before. known: where that is kept from then on. */
PyObject *
held_by(PyObject *module, PyObject **known)
{
    PyObject *there = *known == NULL ? PyImport_GetModule(module) : NULL;
    if (there != NULL) {
        *known = Py_XNewRef(PyModule_GetDict(there));
        Py_DECREF(there);
    }
    return *known;
}

/* By the clock of time.monotonic_ns on Linux. */
int64_t
now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* ---------------------------------------------------------------- FlightRecorder.enter, .leave, .stood */

/* Its file in memory, to be released; 0, without an error, where there is none. */
static int
memory_of(PyObject *recorder, Py_buffer *memory)
{
    PyObject *mapped = HELD(recorder, RECORDER, R_MEMORY);
    if (mapped != NULL && PyObject_GetBuffer(mapped, memory, PyBUF_WRITABLE) == 0) {
        if (memory->len >= RING_AT + RECORDS * RECORD_BYTES)
            return 1;
        PyBuffer_Release(memory);
    }
    PyErr_Clear();
    return 0;
}

static int64_t *
record_in(Py_buffer *memory, long long number)
{
    return (int64_t *)((char *)memory->buf + RING_AT + number % RECORDS * RECORD_BYTES);
}

/* Whether `enter` may be called: by the rank's own thread, with nothing to be taken up first. */
int
can_enter(PyObject *recorder, PyObject *words)
{
    PyObject *left = HELD(recorder, RECORDER, R_LEFT), *digests = HELD(recorder, RECORDER, R_DIGESTS);
    if (!is_owner(recorder, RECORDER, R_OWNER) || left == NULL || !PyList_CheckExact(left) || PyList_GET_SIZE(left) != 0)
        return 0;
    if (digests == NULL || !PyDict_CheckExact(digests) || !PyTuple_Check(words) || PyTuple_GET_SIZE(words) != 3)
        return 0;
    PyObject *stored = PyTuple_GET_ITEM(words, 0);
    return PyBytes_Check(stored) && PyBytes_GET_SIZE(stored) <= WORDS_BYTES;
}

/* The next of an itertools.count; -1 with an error. */
long long
next_of(PyObject *numbers)
{
    PyObject *number = PyIter_Next(numbers);
    long long found = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return found;
}

/* What `_digests` has for a group, which is the same list for good: borrowed; NULL with an error. */
static PyObject *
digest_of(PyObject *digests, PyObject *group)
{
    static PyObject *last_digests, *last_group, *last; /* what was found last */
    if (digests == last_digests && group == last_group)
        return last;
    PyObject *found = PyDict_GetItemWithError(digests, group), *made = NULL;
    if (found == NULL && !PyErr_Occurred() && (made = Py_BuildValue("[i]", 0)) != NULL)
        found = PyDict_SetDefault(digests, group, made);
    if (found != NULL) {
        Py_XSETREF(last_digests, Py_NewRef(digests));
        Py_XSETREF(last_group, Py_NewRef(group));
        Py_XSETREF(last, Py_NewRef(found));
    }
    Py_XDECREF(made);
    return found;
}

/* The digest of the collectives of a group up to this one, in `digest`; -1 with an error. */
static int
chain(PyObject *recorder, PyObject *group, PyObject *code, int64_t *digest)
{
    PyObject *before = digest_of(HELD(recorder, RECORDER, R_DIGESTS), group);
    if (before == NULL)
        return -1;
    /* kept: what is allocated may let go of anything, and who hears of that may enter another one */
    PyObject *first = Py_NewRef(PyList_GET_ITEM(before, 0)), *step = Py_NewRef(HELD(recorder, RECORDER, R_STEP));
    PyObject *all = PyTuple_Pack(3, first, code, step);
    Py_hash_t hash = all == NULL ? -1 : PyObject_Hash(all);
    PyObject *after = hash == -1 ? NULL : PyLong_FromSsize_t(hash);
    *digest = hash;
    Py_XDECREF(all);
    Py_DECREF(step);
    Py_DECREF(first);
    return after == NULL ? -1 : PyList_SetItem(before, 0, after);
}

/* The number of what begins now; -1 with an error. */
long long
enter(PyObject *recorder, long long seq, PyObject *words, int is_message, int64_t now_ns)
{
    PyObject *stored = PyTuple_GET_ITEM(words, 0), *count;
    Py_buffer memory;
    int64_t digest = 0;
    long long number = next_of(HELD(recorder, RECORDER, R_NUMBERS));
    if (number < 0)
        return -1;
    if (!is_message && chain(recorder, PyTuple_GET_ITEM(words, 1), PyTuple_GET_ITEM(words, 2), &digest) < 0)
        return -1;
    if (!memory_of(recorder, &memory))
        return number;
    int64_t *record = record_in(&memory, number);
    char *rest = (char *)(record + FIELDS);
    record[NUMBER] = number;
    record[SEQ] = seq;
    record[STEP] = number_in(recorder, RECORDER, R_STEP);
    record[ENTERED] = now_ns ? now_ns : now();
    record[LEFT] = 0;
    record[DIGEST] = digest;
    rest[0] = (char)is_message;
    rest[1] = 0;
    Py_ssize_t size = PyBytes_GET_SIZE(stored);
    memcpy(rest + 2, PyBytes_AS_STRING(stored), size);
    memset(rest + 2 + size, 0, WORDS_BYTES - size);
    if (number >= number_in(recorder, RECORDER, R_STARTED) && (count = PyLong_FromLongLong(number + 1)) != NULL) {
        hold(recorder, RECORDER, R_STARTED, count); /* another thread may be ahead */
        *(int64_t *)((char *)memory.buf + COUNT_AT) = number + 1;
    }
    PyBuffer_Release(&memory);
    return PyErr_Occurred() ? -1 : number;
}

void
leave(PyObject *recorder, long long number, int64_t ended_ns)
{
    Py_buffer memory;
    if (number >= 0 && number >= number_in(recorder, RECORDER, R_STARTED) - RECORDS && memory_of(recorder, &memory)) {
        record_in(&memory, number)[LEFT] = ended_ns;
        PyBuffer_Release(&memory);
    }
}

/* The rank's own thread has stood still for what has ended now, or at `ended_ns`; -1 with an error. */
int
stood(PyObject *recorder, long long number, int64_t since_ns, int64_t ended_ns)
{
    PyObject *clock = HELD(recorder, RECORDER, R_CLOCK);
    int64_t now_ns = now();
    leave(recorder, number, ended_ns ? ended_ns : now_ns);
    if (HELD(clock, CLOCK, C_IS_BRIEF) == Py_True || HELD(clock, CLOCK, C_CLOSE_READER) == Py_None)
        return 0;
    PyObject *its = Py_BuildValue("LLL", number, (long long)since_ns, (long long)now_ns), *done;
    if (its == NULL)
        return -1;
    PyObject *waits = HELD(clock, CLOCK, C_WAITS); /* not before: what is allocated may let go of anything */
    int failed;
    if (PyList_CheckExact(waits) && PyList_GET_SIZE(waits) < LISTED_MAX - 1) {
        failed = PyList_Append(waits, its);
    } else {
        PyObject *args[] = {clock, PyTuple_GET_ITEM(its, 0), PyTuple_GET_ITEM(its, 1), PyTuple_GET_ITEM(its, 2)};
        failed = (done = PyObject_VectorcallMethod(name_waited, args, 4, NULL)) == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    Py_DECREF(its);
    return failed;
}

/* As FlightRecorder.set_step. */
void
set_step(PyObject *recorder, PyObject *step)
{
    Py_buffer memory;
    hold(recorder, RECORDER, R_STEP, Py_NewRef(step));
    if (memory_of(recorder, &memory)) {
        *(int64_t *)((char *)memory.buf + STEP_AT) = PyLong_AsLongLong(step);
        PyBuffer_Release(&memory);
    }
}

PyObject *
quick_enter(PyObject *const *args, Py_ssize_t count)
{
    if (count < 3 || count > 5 || !IS(args[0], RECORDER) || !can_enter(args[0], args[2]))
        return DECLINED;
    long long seq = PyLong_AsLongLong(args[1]), now_ns = count < 5 ? 0 : PyLong_AsLongLong(args[4]);
    int is_message = count < 4 ? 0 : PyObject_IsTrue(args[3]);
    long long number = PyErr_Occurred() ? -1 : enter(args[0], seq, args[2], is_message, now_ns);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}

/* Whether its times are those of `now`, and not, as in a test, somebody's who tells it the time, or of a stream. */
int
is_timed(PyObject *clock)
{
    return IS(clock, CLOCK) && HELD(clock, CLOCK, C_TIME) == monotonic_ns;
}

/* Whether `stood` may be called: by the rank's own thread. */
int
can_stand(PyObject *recorder)
{
    PyObject *clock = HELD(recorder, RECORDER, R_CLOCK);
    return is_owner(recorder, RECORDER, R_OWNER) && is_timed(clock) && HELD(clock, CLOCK, C_WAITS) != NULL;
}

PyObject *
quick_stood(PyObject *const *args, Py_ssize_t count)
{
    if (count < 3 || count > 4 || !IS(args[0], RECORDER) || !can_stand(args[0]))
        return DECLINED;
    long long number = PyLong_AsLongLong(args[1]), since_ns = PyLong_AsLongLong(args[2]);
    long long ended_ns = count < 4 ? 0 : PyLong_AsLongLong(args[3]);
    return PyErr_Occurred() || stood(args[0], number, since_ns, ended_ns) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---------------------------------------------------------------- in_line */

/* Append to `marks` or to `open` what they are to have of a record; -1 with an error. */
static int
read_record(const int64_t *record, int is_kept, PyObject *marks, PyObject *open)
{
    long long seq = record[SEQ], step = record[STEP], digest = record[DIGEST];
    PyObject *mark = is_kept ? Py_BuildValue("LLL", seq, step, digest) : NULL;
    PyObject *number = record[LEFT] == 0 ? PyLong_FromLongLong(record[NUMBER]) : NULL;
    int failed = PyErr_Occurred() || (mark != NULL && PyList_Append(marks, mark) < 0) ||
                 (number != NULL && PyList_Append(open, number) < 0);
    Py_XDECREF(number);
    Py_XDECREF(mark);
    return failed ? -1 : 0;
}

PyObject *
quick_in_line(PyObject *const *args, Py_ssize_t count)
{
    Py_buffer memory;
    if (count != 5 || PyObject_GetBuffer(args[0], &memory, PyBUF_SIMPLE) < 0)
        return count != 5 ? DECLINED : NULL;
    long long since = PyLong_AsLongLong(args[1]), until = PyLong_AsLongLong(args[2]);
    long long every = PyLong_AsLongLong(args[3]), newest = PyLong_AsLongLong(args[4]);
    PyObject *marks = PyList_New(0), *open = PyList_New(0), *found = NULL;
    int is_well = marks != NULL && open != NULL && !PyErr_Occurred();
    if (is_well && memory.len >= RING_AT + RECORDS * RECORD_BYTES && 0 <= since && since < until && every > 0) {
        const int64_t *first = record_in(&memory, since);
        const char *group = (const char *)(first + FIELDS) + 2;
        Py_ssize_t size = strnlen(group, WORDS_BYTES - 1) + 1; /* with its end */
        int is_in_line = until - since <= RECORDS;
        for (long long number = since; number < until && is_in_line && is_well; number++) {
            const int64_t *record = record_in(&memory, number);
            const char *rest = (const char *)(record + FIELDS);
            is_in_line = record[NUMBER] == number && record[SEQ] == first[SEQ] + number - since && rest[0] == 0 &&
                         memcmp(rest + 2, group, size) == 0;
            if (is_in_line)
                is_well = read_record(record, record[SEQ] % every == 0 || number >= until - newest, marks, open) == 0;
        }
        PyObject *name = is_well && is_in_line ? PyUnicode_DecodeUTF8(group, size - 1, "replace") : NULL;
        if (name != NULL)
            found = PyTuple_Pack(3, name, marks, open);
        else if (is_well && !is_in_line)
            found = Py_NewRef(Py_None);
        Py_XDECREF(name);
    } else if (is_well) {
        found = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&memory);
    Py_XDECREF(open);
    Py_XDECREF(marks);
    return found;
}
