/* What the guard does at every operation, in C: to find its words, to enter it, to see it end.

   Each `quick_` function does what one method does in Python, for the case that steps are made of: lines that are known,
   the rank's own thread, tensors on the CPU, no failure. All else it declines, before it has changed anything, and the
   method itself is called. So the Python is whole without these files, which are compiled where there is a compiler.
   They read what objects hold by the offsets of their `__slots__`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

#define DECLINED Py_NotImplemented /* borrowed: the method is to be called */
enum { LISTED_MAX = 4096 };        /* WAITS and MARKS of `step_clock.py` */

typedef PyObject *(*Way)(PyObject *const *args, Py_ssize_t count);
typedef PyObject *(*HeldWay)(PyObject *held, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *quick_enter(PyObject *const *, Py_ssize_t), *quick_stood(PyObject *const *, Py_ssize_t);
PyObject *quick_switch(PyObject *const *, Py_ssize_t), *quick_submit(PyObject *const *, Py_ssize_t);
PyObject *quick_wait(PyObject *const *, Py_ssize_t), *quick_del(PyObject *const *, Py_ssize_t);
PyObject *quick_passed(PyObject *const *, Py_ssize_t), *quick_in_line(PyObject *const *, Py_ssize_t);
PyObject *quick_noting(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *quick_leaving(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *quick_backward(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
int can_note(PyObject *held), can_leave(PyObject *held), can_see(PyObject *held);
PyObject *standing(PyObject *, PyObject *);
int is_held_by(PyObject *quick, PyObject *held);
PyObject *quick_begins(PyObject *const *, Py_ssize_t), *quick_ends(PyObject *const *, Py_ssize_t);
PyObject *quick_stepped(PyObject *const *, Py_ssize_t), *quick_step_done(PyObject *const *, Py_ssize_t);
PyObject *quick_outermost(PyObject *const *, Py_ssize_t), *quick_sums_of(PyObject *const *, Py_ssize_t);

/* ---------------------------------------------------------------- classes, and what is in their slots */

typedef struct {
    const char *name;
    PyTypeObject *type; /* once `read_in_c` has been told */
    const char *slots[20];
    Py_ssize_t at[20]; /* of its slots */
} Class;

enum { RECORDER, CLOCK, LAYER, WORK, PASSING, ENDS, LOOKOUT, WATCHED, BACKWARDS, PACER, OPTIMIZERS, GRADIENTS, TORCH_STEPS, CLASSES };
enum { R_DIGESTS, R_MEMORY, R_NUMBERS, R_OWNER, R_CLOCK, R_LEFT, R_STARTED, R_STEP };
enum { C_FIRST, C_LEFT, C_BEGAN_NS, C_BEGINS_WITH_MARK, C_CLOSE_READER, C_GPU, C_IS_BRIEF, C_IS_MARKED, C_MARKS, C_OWNER };
enum { C_REST = C_OWNER + 1, C_SAMPLES, C_STEP, C_SUMMED_NS, C_TIME, C_VALUES, C_WAITS };
enum { L_COLLECTIVES, L_OF_LINES, L_INNER, L_IS_QUEUED, L_RECORDER };
enum { W_ERRORS, W_LAYER, W_NUMBER, W_OTHERS, W_WORK };
enum { P_ACTIVITIES, P_ENDED_NS, P_ENDS, P_FOLLOWED, P_LEFT, P_LOOKOUT, P_RECORDER, P_TAKE_UP };
enum { E_OPERATIONS };
enum { O_FINDING };
enum { B_FAILED, B_IS_SOUND, B_LOSSES, B_ONCE, B_OWN, B_PHASES, B_PLACES, B_RECENT, B_SCALED, B_STEP_SITE };
enum { E_PLANNED, E_SEEN, E_IS_BRIEF };
enum { Z_BEGUN, Z_IS_UNSEEN, Z_MARKED, Z_BACKWARDS, Z_COUNTED, Z_LOOKS, Z_PHASES, Z_STEPS };
enum { F_DUE_NS, F_RECORDER, F_SEEN };
enum { T_RECORDER, T_CLOCK, T_GUARD };
enum { G_COLLECTIVES, G_HAS_STREAMS, G_INSIDE, G_OF_LINES, G_OF_SITES, G_SEEN };
extern Class classes[];

/* Whether this is one of that class. */
#define IS(object, class) ((object) != NULL && Py_TYPE(object) == classes[class].type)
/* What it holds in a slot: borrowed, and NULL before it is set. */
#define HELD(object, class, slot) (*(PyObject **)((char *)(object) + classes[class].at[slot]))

/* What a function of Python's holds in its closure: borrowed. */
#define THEIR(held, what) PyTuple_GET_ITEM(held, what)

/* `value` is the object's own from now on. */
static inline void
hold(PyObject *object, int class, int slot, PyObject *value)
{
    Py_XSETREF(HELD(object, class, slot), value);
}

/* A number that it holds. */
static inline long long
number_in(PyObject *object, int class, int slot)
{
    PyObject *held = HELD(object, class, slot);
    return held == NULL ? -1 : PyLong_AsLongLong(held);
}

/* Whether the thread that calls is the one whose number it holds. */
static inline int
is_owner(PyObject *object, int class, int slot)
{
    PyObject *held = HELD(object, class, slot);
    return held != NULL && PyLong_AsUnsignedLongMask(held) == PyThread_get_thread_ident();
}

/* ---------------------------------------------------------------- names, and the functions of `record.c` */

extern PyObject *comm_error, *get_frame, *monotonic_ns, *partial;
extern PyObject *nothing; /* () */
extern PyObject *name_cuda, *name_first, *name_initialized, *name_mode, *name_pace, *name_pacer, *name_plan, *name_settings;
extern PyObject *name_append, *name_clear, *name_is_cpu, *name_item, *name_numel, *name_reduce_op, *name_root;
extern PyObject *name_all_reduce, *name_dtype, *name_ended_ns, *name_fail, *name_inside, *name_leave, *name_seen;
extern PyObject *name_sequence, *name_shape, *name_submit, *name_wait, *name_waited;
extern PyObject *name_checked, *name_data_ptr, *name_forwards, *name_guard, *name_has_counted, *name_is_forwarded;
extern PyObject *name_is_on, *name_leader, *name_models, *name_module, *name_pending, *name_recorder;
extern PyObject *name_replicas, *name_sample, *name_stamped, *name_stamps, *name_step, *name_stepper;
extern PyObject *name_stride, *name_told, *name_version;

/* ---------------------------------------------------------------- lines of programs: `lines.c` */

enum { SIZES_MAX = 6 };
typedef struct {
    PyObject *of_lines, *code, *reduce, *label, *words; /* what tells the call from others; what is recorded of it */
    long long reduction, root;
    int32_t instruction, sizes, dtype;
    int64_t shape[SIZES_MAX];
} Line;

PyObject *code_at(long depth, int32_t *instruction);
int line_at(long depth, Line *line);
PyObject *key_of(PyObject *code, int32_t instruction);
int describe(Line *line, PyObject *tensor);
PyObject *words_at(const Line *line);
void keep_line(Line line, PyObject *words);

int64_t now(void);
PyObject *held_by(PyObject *module, PyObject **known);
void tell(PyObject *saw);
long long next_of(PyObject *numbers);
int can_enter(PyObject *recorder, PyObject *words);
long long enter(PyObject *recorder, long long seq, PyObject *words, int is_message, int64_t now_ns);
void leave(PyObject *recorder, long long number, int64_t ended_ns);
int can_stand(PyObject *recorder);
int is_timed(PyObject *clock);
void set_step(PyObject *recorder, PyObject *step);
int stood(PyObject *recorder, long long number, int64_t since_ns, int64_t ended_ns);
