/* The module `_methods`: which classes it reads, which methods it tries. */

#include "held.h"
#include <stddef.h>
#include <structmember.h>

Class classes[] = {
    {.name = "FlightRecorder",
     .slots = {"_digests", "_memory", "_numbers", "_owner", "clock", "left", "started", "step"}},
    {.name = "StepClock",
     .slots = {"_first", "_left", "began_ns", "begins_with_mark", "close_reader", "gpu", "is_brief", "is_marked",
               "marks", "owner", "rest", "samples", "step", "summed_ns", "time", "values", "waits"}},
    {.name = "GuardLayer", .slots = {"_collectives", "_of_lines", "inner", "is_queued", "recorder"}},
    {.name = "RecordedWork", .slots = {"_errors", "_layer", "_number", "_others", "_work"}},
    {.name = "Passing",
     .slots = {"_activities", "_ended_ns", "_ends", "_followed", "_left", "_lookout", "_recorder", "_take_up"}},
    {.name = "StepEnds", .slots = {"operations"}},
    {.name = "Lookout", .slots = {"finding"}},
    {.name = "WatchedGroup", .slots = {"collectives", "has_streams", "inside", "of_lines", "of_sites", "seen"}},
    {.name = "Backwards",
     .slots = {"failed", "is_sound", "losses", "once", "own", "phases", "_places", "recent", "scaled", "step_site"}},
    {.name = "Pace", .slots = {"_planned", "_seen", "is_brief"}},
    {.name = "Optimizers",
     .slots = {"_begun", "_is_unseen", "_marked", "backwards", "counted", "looks", "phases", "steps"}},
    {.name = "GradientFacts", .slots = {"due_ns", "recorder", "seen"}},
    {.name = "TorchSteps", .slots = {"_recorder", "clock", "guard"}},
};

PyObject *comm_error, *get_frame, *monotonic_ns, *nothing, *partial;
static PyObject *get_objects;
PyObject *name_cuda, *name_first, *name_initialized, *name_mode, *name_pace, *name_pacer, *name_plan, *name_settings;
PyObject *name_append, *name_clear, *name_is_cpu, *name_item, *name_numel, *name_reduce_op, *name_root;
PyObject *name_all_reduce, *name_dtype, *name_ended_ns, *name_fail, *name_inside, *name_leave, *name_seen;
PyObject *name_sequence, *name_shape, *name_submit, *name_wait, *name_waited;
PyObject *name_checked, *name_data_ptr, *name_forwards, *name_guard, *name_has_counted, *name_is_forwarded;
PyObject *name_is_on, *name_leader, *name_models, *name_module, *name_pending, *name_recorder;
PyObject *name_replicas, *name_sample, *name_stamped, *name_stamps, *name_step, *name_stepper;
PyObject *name_stride, *name_told, *name_version;

/* ---------------------------------------------------------------- a method that is tried here first */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *plain; /* the method in Python */
    Way way;
    PyObject *held; /* or NULL: what a function of Python's holds in its closure */
    HeldWay held_way;
} Quick;

static PyObject *
quick_call(Quick *self, PyObject *const *args, size_t count, PyObject *names)
{
    Py_ssize_t given = PyVectorcall_NARGS(count);
    PyObject *answer = DECLINED;
    if (self->held != NULL)
        answer = self->held_way(self->held, args, given, names);
    else if (names == NULL)
        answer = self->way(args, given);
    return answer == DECLINED ? PyObject_Vectorcall(self->plain, args, count, names) : answer;
}

static PyObject *
quick_get(PyObject *self, PyObject *owner, PyObject *Py_UNUSED(type))
{
    return owner == NULL ? Py_NewRef(self) : PyMethod_New(self, owner);
}

static PyObject *
quick_getattro(Quick *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr((PyObject *)self, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(self->plain, name); /* its name, its code */
}

static void
quick_dealloc(Quick *self)
{
    Py_XDECREF(self->plain);
    Py_XDECREF(self->held);
    PyObject_Free(self);
}

static PyMemberDef quick_members[] = {{"__wrapped__", T_OBJECT, offsetof(Quick, plain), READONLY, NULL}, {NULL}};

static PyTypeObject QuickType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lockstep.observe.native._methods.Quick",
    .tp_basicsize = sizeof(Quick),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Quick, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = quick_get,
    .tp_getattro = (getattrofunc)quick_getattro,
    .tp_dealloc = (destructor)quick_dealloc,
    .tp_members = quick_members,
};

/* Whether it is a function that `in_c` was given with that. */
int
is_held_by(PyObject *quick, PyObject *held)
{
    return Py_TYPE(quick) == &QuickType && ((Quick *)quick)->held == held;
}

/* The list of all objects is gone before another thread runs. */
static PyObject *
quick_instances(PyObject *const *args, Py_ssize_t count)
{
    if (count != 1 || !PyType_Check(args[0]))
        return DECLINED;
    PyObject *found = PyList_New(0), *all = found == NULL ? NULL : PyObject_CallNoArgs(get_objects);
    int is_well = all != NULL;
    for (Py_ssize_t at = 0; is_well && at < PyList_GET_SIZE(all); at++) {
        PyObject *one = PyList_GET_ITEM(all, at);
        if (PyType_IsSubtype(Py_TYPE(one), (PyTypeObject *)args[0]))
            is_well = PyList_Append(found, one) == 0;
    }
    Py_XDECREF(all);
    if (!is_well)
        Py_CLEAR(found);
    return found;
}

static const struct {
    const char *name;
    Way way;
    HeldWay held_way; /* in the place of `way`: of a function that needs what its closure holds */
    int (*can_go_by)(PyObject *held);
} ways[] = {
    {"FlightRecorder.enter", quick_enter, NULL, NULL},
    {"FlightRecorder.stood", quick_stood, NULL, NULL},
    {"StepClock.switch", quick_switch, NULL, NULL},
    {"GuardLayer.submit", quick_submit, NULL, NULL},
    {"RecordedWork.wait", quick_wait, NULL, NULL},
    {"RecordedWork.__del__", quick_del, NULL, NULL},
    {"Passing.passed", quick_passed, NULL, NULL},
    {"Optimizers._begins", quick_begins, NULL, NULL},
    {"Optimizers._ends", quick_ends, NULL, NULL},
    {"Optimizers.step_done", quick_step_done, NULL, NULL},
    {"TrainingWatch.stepped", quick_stepped, NULL, NULL},
    {"instances", quick_instances, NULL, NULL},
    {"in_line", quick_in_line, NULL, NULL},
    {"outermost", quick_outermost, NULL, NULL},
    {"sums_of", quick_sums_of, NULL, NULL},
    {"TorchWatch._noting.<locals>.call", NULL, quick_noting, can_note},
    {"TorchWatch._leaving.<locals>.wait", NULL, quick_leaving, can_leave},
    {"Backwards._seeing.<locals>.backward", NULL, quick_backward, can_see},
};
enum { WAYS = sizeof(ways) / sizeof(*ways) };

/* in_c(method), in_c(function, held): that, tried here first. */
static PyObject *
in_c(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *plain, *held = NULL, *name;
    if (!PyArg_ParseTuple(args, "O|O!", &plain, &PyTuple_Type, &held) ||
        (name = PyObject_GetAttrString(plain, "__qualname__")) == NULL)
        return NULL;
    const char *wanted = PyUnicode_AsUTF8(name);
    size_t at = 0;
    while (wanted != NULL && at < WAYS && strcmp(wanted, ways[at].name) != 0)
        at++;
    int is_known = wanted != NULL && at < WAYS && (held == NULL ? ways[at].way != NULL : ways[at].held_way != NULL);
    if (wanted != NULL && !is_known)
        PyErr_Format(PyExc_LookupError, "%s is not in C", wanted);
    else if (is_known && held != NULL && !ways[at].can_go_by(held))
        PyErr_Format(PyExc_TypeError, "%s does not go by %R", wanted, held);
    Py_DECREF(name);
    Quick *made = PyErr_Occurred() ? NULL : PyObject_New(Quick, &QuickType);
    if (made != NULL) {
        made->vectorcall = (vectorcallfunc)quick_call;
        made->plain = Py_NewRef(plain);
        made->way = ways[at].way;
        made->held = Py_XNewRef(held);
        made->held_way = ways[at].held_way;
    }
    return (PyObject *)made;
}

/* read_in_c(class): that, whose objects are read here from now on. */
static PyObject *
read_in_c(PyObject *Py_UNUSED(module), PyObject *type)
{
    Class *its = classes;
    if (!PyType_Check(type))
        return PyErr_Format(PyExc_TypeError, "a class is expected");
    while (its < classes + CLASSES && strcmp(its->name, ((PyTypeObject *)type)->tp_name) != 0)
        its++;
    if (its == classes + CLASSES)
        return PyErr_Format(PyExc_LookupError, "%R is not in C", type);
    for (int slot = 0; its->slots[slot] != NULL; slot++) {
        PyObject *member = PyObject_GetAttrString(type, its->slots[slot]);
        if (member == NULL || !Py_IS_TYPE(member, &PyMemberDescr_Type)) {
            Py_XDECREF(member);
            return PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, its->slots[slot]);
        }
        its->at[slot] = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_DECREF(member);
    }
    its->type = (PyTypeObject *)Py_NewRef(type); /* for good */
    return Py_NewRef(type);
}

static PyMethodDef methods[] = {
    {"in_c", in_c, METH_VARARGS, NULL},
    {"read_in_c", read_in_c, METH_O, NULL},
    {"standing", standing, METH_NOARGS, NULL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_methods", .m_size = -1, .m_methods = methods};

static const struct {
    PyObject **place;
    const char *module, *name; /* an attribute of the module; without one a name itself */
} known[] = {
    {&comm_error, "lockstep.errors", "CommError"},
    {&get_frame, "sys", "_getframe"},
    {&get_objects, "gc", "get_objects"},
    {&monotonic_ns, "time", "monotonic_ns"},
    {&partial, "functools", "partial"},
    {&name_all_reduce, NULL, "all_reduce"},
    {&name_cuda, NULL, "torch.cuda"},
    {&name_first, NULL, "FIRST"},
    {&name_has_counted, NULL, "_has_counted"},
    {&name_initialized, NULL, "_initialized"},
    {&name_mode, NULL, "mode"},
    {&name_pace, NULL, "lockstep.observe.pace"},
    {&name_pacer, NULL, "PACE"},
    {&name_plan, NULL, "plan"},
    {&name_settings, NULL, "settings"},
    {&name_inside, NULL, "inside"},
    {&name_append, NULL, "append"},
    {&name_clear, NULL, "clear"},
    {&name_is_cpu, NULL, "is_cpu"},
    {&name_item, NULL, "item"},
    {&name_numel, NULL, "numel"},
    {&name_reduce_op, NULL, "reduceOp"},
    {&name_root, NULL, "rootRank"},
    {&name_seen, NULL, "seen"},
    {&name_sequence, NULL, "_get_sequence_number_for_group"},
    {&name_submit, NULL, "submit"},
    {&name_wait, NULL, "wait"},
    {&name_waited, NULL, "waited"},
    {&name_leave, NULL, "_leave"},
    {&name_fail, NULL, "_fail"},
    {&name_shape, NULL, "shape"},
    {&name_dtype, NULL, "dtype"},
    {&name_ended_ns, NULL, "ended_ns"},
    {&name_checked, NULL, "checked"},
    {&name_data_ptr, NULL, "data_ptr"},
    {&name_forwards, NULL, "forwards"},
    {&name_is_forwarded, NULL, "is_forwarded"},
    {&name_is_on, NULL, "is_on"},
    {&name_leader, NULL, "leader"},
    {&name_models, NULL, "_models"},
    {&name_module, NULL, "module"},
    {&name_pending, NULL, "_pending"},
    {&name_recorder, NULL, "recorder"},
    {&name_guard, NULL, "_guard"},
    {&name_replicas, NULL, "replicas"},
    {&name_sample, NULL, "sample"},
    {&name_stamped, NULL, "_stamped"},
    {&name_stamps, NULL, "stamps"},
    {&name_step, NULL, "_step"},
    {&name_stepper, NULL, "_stepper"},
    {&name_stride, NULL, "stride"},
    {&name_told, NULL, "told"},
    {&name_version, NULL, "_version"},
};

PyMODINIT_FUNC
PyInit__methods(void)
{
    for (size_t at = 0; at < sizeof(known) / sizeof(*known); at++) {
        PyObject *module = known[at].module == NULL ? NULL : PyImport_ImportModule(known[at].module);
        if (known[at].module == NULL)
            *known[at].place = PyUnicode_InternFromString(known[at].name);
        else if (module != NULL)
            *known[at].place = PyObject_GetAttrString(module, known[at].name);
        Py_XDECREF(module);
        if (*known[at].place == NULL)
            return NULL;
    }
    nothing = PyTuple_New(0);
    PyObject *module = nothing == NULL || PyType_Ready(&QuickType) < 0 ? NULL : PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "SOURCES", SOURCES) < 0)
        Py_CLEAR(module);
    return module;
}
