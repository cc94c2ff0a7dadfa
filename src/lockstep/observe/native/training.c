/* What a step leaves of the models that are followed: see `torch_training.py`. For the case that nothing is to be told
   or compared after it.

   What is read here lies in objects that are made once, and by other hands too, so it is asked for by name. */

#include "held.h"

enum { SYNCHRONISED, OTHERS, FORWARDS_SIZE = 3 }; /* of `Model.forwards` */

/* A number, or a truth, that an attribute is; -1 where it is none. */
static long long
number_of(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    long long number = found == NULL || !PyLong_Check(found) ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    PyErr_Clear();
    return number;
}

/* Whether an attribute, called, is that; of a weak reference what it is to. */
static int
refers_to(PyObject *object, PyObject *name, PyObject *wanted)
{
    PyObject *weak = PyObject_GetAttr(object, name), *there = weak == NULL ? NULL : PyObject_CallNoArgs(weak);
    int is_so = there == wanted;
    Py_XDECREF(there);
    Py_XDECREF(weak);
    PyErr_Clear();
    return is_so;
}

/* Whether the replicas are to be compared after that step, or by another optimizer's count. */
static int
is_due(PyObject *replicas, PyObject *optimizer, long long step)
{
    long long is_on = number_of(replicas, name_is_on), stride = number_of(replicas, name_stride);
    return is_on < 0 || (is_on && (stride <= 0 || step % stride == 0 || number_of(replicas, name_checked) <= 0)) ||
           !refers_to(replicas, name_leader, optimizer);
}

/* Whether the forwards of a model in the step that has ended are as they were told, or it has never had any. */
static int
has_no_news(PyObject *model)
{
    PyObject *forwards = PyObject_GetAttr(model, name_forwards), *told = PyObject_GetAttr(model, name_told);
    int is_plain = forwards != NULL && PyList_CheckExact(forwards) && PyList_GET_SIZE(forwards) == FORWARDS_SIZE;
    int is_forwarded = (int)number_of(model, name_is_forwarded), is_so = 0;
    if (is_plain && told != NULL && is_forwarded > 0)
        is_so = PyObject_RichCompareBool(forwards, told, Py_EQ) > 0;
    else if (is_plain && is_forwarded == 0 && !refers_to(model, name_module, Py_None))
        is_so = PyLong_AsLong(PyList_GET_ITEM(forwards, SYNCHRONISED)) == 0 &&
                PyLong_AsLong(PyList_GET_ITEM(forwards, OTHERS)) == 0;
    Py_XDECREF(told);
    Py_XDECREF(forwards);
    PyErr_Clear();
    return is_so;
}

/* As `Model.version`: a new reference, or NULL with an error. */
static PyObject *
version_of(PyObject *model)
{
    PyObject *sample = PyObject_GetAttr(model, name_sample), *found = sample == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t at = 0; found != NULL && PyList_Check(sample) && at < PyList_GET_SIZE(sample); at++) {
        PyObject *param = PyObject_CallNoArgs(PyList_GET_ITEM(sample, at)), *place = NULL, *version = NULL;
        int is_well = param != NULL;
        if (is_well && param != Py_None)
            is_well = (place = PyObject_CallMethodNoArgs(param, name_data_ptr)) != NULL &&
                      (version = PyObject_GetAttr(param, name_version)) != NULL && PyList_Append(found, place) == 0 &&
                      PyList_Append(found, version) == 0;
        Py_XDECREF(version);
        Py_XDECREF(place);
        Py_XDECREF(param);
        if (!is_well)
            Py_CLEAR(found);
    }
    Py_XDECREF(sample);
    return found;
}

/* What a model's `stamps` are after that step: a new reference, or NULL. */
static PyObject *
stamps_after(PyObject *model, PyObject *step)
{
    PyObject *before = PyObject_GetAttr(model, name_stamps), *version = before == NULL ? NULL : version_of(model);
    PyObject *last = version == NULL ? NULL : PyTuple_Pack(2, step, version), *stamps = NULL;
    if (last != NULL && PyTuple_CheckExact(before) && PyTuple_GET_SIZE(before) == 2)
        stamps = PyTuple_Pack(2, PyTuple_GET_ITEM(before, 1), last);
    Py_XDECREF(last);
    Py_XDECREF(version);
    Py_XDECREF(before);
    return stamps;
}

/* Of each model, in a list, its stamps after that step: a new reference; NULL where one of them has news. */
static PyObject *
all_stamps_after(PyObject *models, PyObject *step)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t at = 0; found != NULL && at < PyList_GET_SIZE(models); at++) {
        PyObject *model = PyList_GET_ITEM(models, at), *stamps = has_no_news(model) ? stamps_after(model, step) : NULL;
        if (stamps == NULL || PyList_Append(found, stamps) < 0)
            Py_CLEAR(found);
        Py_XDECREF(stamps);
    }
    PyErr_Clear();
    return found;
}

/* Each model has got through the step; -1 with an error. */
static int
leave_models(PyObject *models, PyObject *stamps)
{
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && at < PyList_GET_SIZE(models); at++) {
        PyObject *model = PyList_GET_ITEM(models, at), *forwards = Py_BuildValue("[iis]", 0, 0, "");
        failed = forwards == NULL || PyObject_SetAttr(model, name_forwards, forwards) < 0 ||
                 PyObject_SetAttr(model, name_stamps, PyList_GET_ITEM(stamps, at)) < 0;
        Py_XDECREF(forwards);
    }
    return failed ? -1 : 0;
}

/* The rank has, by that optimizer; -1 with an error. */
static int
leave_step(PyObject *self, PyObject *replicas, PyObject *optimizer, PyObject *step)
{
    PyObject *leader = PyObject_GetAttr(replicas, name_leader), *stamped = PySet_New(NULL);
    PyObject *id = PyLong_FromVoidPtr(optimizer);
    int is_well = leader != NULL && stamped != NULL && id != NULL && PySet_Add(stamped, id) == 0 &&
                  PyObject_SetAttr(self, name_step, step) == 0 && PyObject_SetAttr(self, name_stepper, leader) == 0 &&
                  PyObject_SetAttr(self, name_pending, Py_None) == 0 && PyObject_SetAttr(self, name_stamped, stamped) == 0;
    Py_XDECREF(id);
    Py_XDECREF(stamped);
    Py_XDECREF(leader);
    return is_well ? 0 : -1;
}

PyObject *
quick_stepped(PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || args[2] != Py_True)
        return DECLINED;
    PyObject *guard = PyObject_GetAttr(args[0], name_guard), *replicas = PyObject_GetAttr(args[0], name_replicas);
    PyObject *recorder = guard == NULL ? NULL : PyObject_GetAttr(guard, name_recorder);
    PyObject *models = PyObject_GetAttr(args[0], name_models), *all = NULL, *stamps = NULL, *answer = DECLINED;
    PyObject *step = IS(recorder, RECORDER) ? Py_XNewRef(HELD(recorder, RECORDER, R_STEP)) : NULL;
    long long before = number_of(args[0], name_step), number = step == NULL ? -1 : PyLong_AsLongLong(step);
    if (replicas != NULL && models != NULL && PyDict_CheckExact(models) && before > 0 && number > 1 && number != before &&
        !is_due(replicas, args[1], number) && (all = PyDict_Values(models)) != NULL)
        stamps = all_stamps_after(all, step);
    PyErr_Clear();
    if (stamps != NULL) {
        int failed = leave_models(all, stamps) < 0 || leave_step(args[0], replicas, args[1], step) < 0;
        answer = failed ? NULL : Py_NewRef(Py_None);
    }
    Py_XDECREF(stamps);
    Py_XDECREF(all);
    Py_XDECREF(step);
    Py_XDECREF(models);
    Py_XDECREF(replicas);
    Py_XDECREF(recorder);
    Py_XDECREF(guard);
    return answer;
}
