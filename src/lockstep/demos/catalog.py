"""The gallery: which fault each program here has, how stock torch takes it, and what lockstep has to say of it.

A row is one of the table of failures in docs/diagnosis.md; several demos may vary one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final


class Place(NamedTuple):
    """What one process of a demo of the environment is told of its place in the job."""

    rank: str | None = None
    world_size: str | None = "2"
    address: str | None = "127.0.0.1"
    port: str = "own"  # "own": a free one; "other": another free one; "foreign": one where another program listens


@final
@dataclass(frozen=True)
class Demo:
    """One program with a fault.

    says: regular expressions that lockstep's output has to match: the culprit's rank, and the line of the program.
    quiet: nothing is wrong, and nothing must be said. places: the processes are started by hand, with a faulty
    environment each, and not by a launcher; these programs meet by `lockstep.init`.
    """

    name: str
    title: str
    row: int
    stock: str  # what stock torch does
    says: tuple[str, ...] = ()
    ranks: int = 2
    quiet: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    places: tuple[Place, ...] = ()

    @property
    def script(self) -> Path:
        """The program."""
        return Path(__file__).with_name("meet.py" if self.places else f"{self.name}.py")

    @property
    def stock_script(self) -> Path:
        """The program, without anything of lockstep's."""
        return Path(__file__).with_name("meet_stock.py" if self.places else f"{self.name}.py")


def at(name: str, line: int) -> str:
    """A line of the program `name`, as a report names it."""
    return rf"\b{name}\.py:{line}\b"


_GARBAGE = "goes on with garbage, and says nothing"
_BLOCKED = "waits 30 minutes, then says 'Timed out waiting 1800000ms' without a rank"
_CLOSED = "the other rank says 'Connection closed by peer', not who or why"
_ABORTED = "one rank is ended by SIGABRT from C++, without a Python traceback; the other says 'Connection reset'"
_DRIFT = "trains on with a different model on each rank, and says nothing"
_CHECK: Mapping[str, str] = {"LOCKSTEP_GUARD": "check"}


def _calls(name: str, first: int, second: int, what: str) -> tuple[str, ...]:
    """Two calls that differ in `what`."""
    return (
        r"MISMATCH.*Culprits?: ranks? [01]",
        rf"differ in {what}",
        rf"rank 0: .*{at(name, first)}",
        rf"rank 1: .*{at(name, second)}",
    )


_PLACE = Place()
_MISMATCHED = (
    Demo(
        "skipped_collective",
        "Rank 1 leaves out one of many equal collectives",
        1,
        f"pairs step i with step i + 1 from then on: {_GARBAGE}",
        (r"MISMATCH in step 20.*Culprit: rank 1", rf"rank 1 skipped all_reduce .*{at('skipped_collective', 19)}"),
    ),
    Demo(
        "missing_collective",
        "Rank 1 is busy elsewhere and never comes to the last collective",
        2,
        _BLOCKED,
        (r"HANG.*Culprit: rank 1", rf"rank 1 is not there: at .*{at('missing_collective', 13)} load_batch"),
    ),
    Demo(
        "early_exit",
        "Only rank 0 calls barrier; rank 1 comes to its end",
        3,
        f"{_CLOSED}; torchrun blames rank 0",
        (r"rank 1 finished normally.* after 1 collective,", r"rank 0 wanted a 2nd", at("early_exit", 10)),
    ),
    Demo(
        "different_collectives",
        "all_reduce on rank 0, broadcast on rank 1",
        4,
        _BLOCKED,
        _calls("different_collectives", 10, 12, "kind"),
    ),
    Demo(
        "gather_against_reduce",
        "all_reduce on rank 0, all_gather on rank 1",
        4,
        _BLOCKED,
        _calls("gather_against_reduce", 10, 12, "kind"),
    ),
    Demo(
        "barrier_against_reduce",
        "all_reduce on rank 0, barrier on rank 1",
        4,
        _BLOCKED,
        _calls("barrier_against_reduce", 11, 9, "kind"),
    ),
    Demo(
        "object_against_tensor",
        "all_gather_object on rank 0, all_reduce on rank 1",
        4,
        _BLOCKED,
        _calls("object_against_tensor", 9, 11, "kind"),
    ),
    Demo(
        "different_sizes",
        "10 elements on rank 0, 20 on rank 1",
        5,
        _ABORTED,
        _calls("different_sizes", 8, 8, "shape"),
    ),
    Demo(
        "different_sizes_gathered",
        "all_gather of 4 elements on rank 0, of 6 on rank 1",
        5,
        _ABORTED,
        _calls("different_sizes_gathered", 9, 9, "shape"),
    ),
    Demo(
        "different_shapes",
        "Shape (2, 3) on rank 0, (3, 2) on rank 1",
        6,
        _GARBAGE,
        _calls("different_shapes", 11, 11, "shape"),
    ),
    Demo(
        "short_broadcast",
        "Rank 0 broadcasts 10 elements into 20 of rank 1",
        7,
        "leaves the tail of the tensor as it was, and says nothing",
        _calls("short_broadcast", 11, 11, "shape"),
    ),
    Demo(
        "different_dtypes",
        "float32 on rank 0, int32 on rank 1",
        8,
        "adds the bits of floats to integers: 1065353216; says nothing",
        _calls("different_dtypes", 11, 11, "dtype"),
    ),
    Demo(
        "different_halves",
        "bfloat16 on rank 0, float16 on rank 1",
        8,
        "makes 24.0 and 1.876 of 1 + 1; says nothing",
        _calls("different_halves", 11, 11, "dtype"),
    ),
    Demo(
        "wider_dtype",
        "float32 on rank 0, float64 on rank 1",
        9,
        _ABORTED,
        _calls("wider_dtype", 8, 8, "dtype"),
    ),
    Demo(
        "different_reductions",
        "A sum on rank 0, a maximum on rank 1",
        10,
        _GARBAGE,
        _calls("different_reductions", 11, 11, "reduction"),
    ),
    Demo(
        "own_roots",
        "Every rank broadcasts from itself",
        11,
        _BLOCKED,
        _calls("own_roots", 8, 8, "root"),
    ),
    Demo(
        "both_receive",
        "Both ranks wait for a message of the other",
        12,
        _BLOCKED,
        (r"DEADLOCK.*rank 0 -> rank 1 -> rank 0", rf"rank 0 waits in recv .*{at('both_receive', 9)}"),
    ),
    Demo(
        "groups_in_other_order",
        "Two groups of the same ranks, used in opposite order",
        13,
        "waits 30 minutes, whatever timeout the job was given",
        (r"DEADLOCK.*groups in different order", rf"rank 1 waits in .*{at('groups_in_other_order', 10)}"),
    ),
    Demo(
        "group_on_one_rank",
        "Only rank 0 makes a group, which every rank has to do",
        13,
        "waits 30 minutes, whatever timeout the job was given",
        (
            r"HANG.*Culprit: rank 1",
            rf"rank 0 waits in new_group .*{at('group_on_one_rank', 10)}",
            rf"rank 1 is not there: at .*{at('group_on_one_rank', 12)}",
        ),
    ),
)

_MODELS = (
    Demo(
        "frozen_before",
        "Rank 1 freezes a layer, and the model is wrapped",
        14,
        "'Rank 0 has 4 params, while rank 1 has inconsistent 3 params', without a name",
        (r"rank 1 has parameter '0.weight' with requires_grad False", at("frozen_before", 11)),
    ),
    Demo(
        "frozen_after",
        "The model is wrapped, and rank 1 freezes a layer",
        15,
        f"one step is not averaged; then rank 1 says 'Expected to have finished reduction', and {_CLOSED}",
        (r"rank 1", r"0\.weight", at("frozen_after", 14)),
    ),
    Demo(
        "frozen_differently",
        "Each rank freezes another parameter of the same shape",
        16,
        "'params[0] in this process with sizes [4, 4] appears not to match', though it does",
        (r"rank 1 has parameter '0.weight' with requires_grad True, rank 0", at("frozen_differently", 10)),
    ),
    Demo(
        "wider_layer",
        "The hidden layer of rank 1 is wider",
        17,
        f"rank 1 names an index and its own sizes; {_CLOSED}",
        (r"rank 1 has parameter '0.weight' with shape \[16, 4\], rank 0 with shape \[8, 4\]", at("wider_layer", 10)),
    ),
    Demo(
        "extra_layer",
        "The model of rank 1 has one layer more",
        17,
        "'Rank 0 has 4 params, while rank 1 has inconsistent 6 params', without a name",
        (r"rank 1 has parameter '2.weight'", at("extra_layer", 9)),
    ),
    Demo(
        "other_order",
        "Rank 1 registers the same layers in another order",
        18,
        "swaps the two layers of rank 1, and says nothing",
        (r"rank 1 has parameter 'b.weight' where rank 0 has parameter 'a.weight'", at("other_order", 22)),
    ),
    Demo(
        "other_seed",
        "Each rank has its own seed, and gradients are averaged by hand",
        19,
        _DRIFT,
        (r"REPLICAS differ", r"weight", rf"ranks 0,1: optimizer made at .*{at('other_seed', 12)}"),
    ),
)

_REPLICAS = (
    Demo(
        "past_ddp",
        "The model within DDP is called: ddp.module(x)",
        20,
        _DRIFT,
        (r"REPLICAS differ after step 21", r"weight", rf"in step 20 a backward went past .*{at('past_ddp', 15)}"),
    ),
    Demo(
        "step_on_one_rank",
        "Rank 1 leaves out one optimizer step",
        20,
        _DRIFT,
        (r"STEPS differ since step 20.*Culprit: rank 1", rf"did not call .*{at('step_on_one_rank', 14)}"),
    ),
    Demo(
        "other_learning_rate",
        "Rank 1 has another learning rate",
        20,
        _DRIFT,
        (r"lr of parameter group 0 is 0.1 on rank 0, 0.01 on rank 1", at("other_learning_rate", 11)),
    ),
    Demo(
        "flipped_bit",
        "One bit of a weight flips on rank 1",
        20,
        _DRIFT,
        (r"'1.weight' is .* on rank 0, .* on rank 1", at("flipped_bit", 14)),
    ),
    Demo(
        "skipped_batch",
        "Rank 1 catches an exception and skips a batch",
        21,
        f"pairs step i with step i + 1: {_GARBAGE}, until {_CLOSED}",
        (r"MISMATCH in step 20.*Culprit: rank 1", at("skipped_batch", 19)),
    ),
    Demo(
        "no_sync_on_one_rank",
        "Rank 1 alone is in no_sync() for one step",
        21,
        f"pairs step i with step i + 1: {_GARBAGE}, until {_CLOSED}",
        (r"(NO_SYNC|MISMATCH).*in step 20.*Culprit: rank 1", r"\bno_sync_on_one_rank\.py:1[56]\b"),
    ),
    Demo(
        "unused_parameter",
        "A layer of the model is never used",
        22,
        "one step is not averaged; then a long text with indices of parameters",
        (r"forgotten\.weight", at("unused_parameter", 21)),
    ),
    Demo(
        "unused_branch",
        "Rank 1 alone does not use a branch of the model",
        23,
        f"rank 1 says 'Expected to have finished reduction', and {_CLOSED}",
        (r"rank 1", r"\bb\.weight", at("unused_branch", 22)),
    ),
    Demo(
        "fewer_batches",
        "Rank 1 has one batch less",
        24,
        _CLOSED,
        (r"FINISHED too early.*Culprit: rank 1", at("fewer_batches", 11)),
    ),
    Demo(
        "uneven_join", "Rank 1 has one batch less, and join() sees to it", 25, "is fine, and so is lockstep", quiet=True
    ),
)

_DATA = (
    Demo(
        "forgotten_set_epoch",
        "Nobody calls sampler.set_epoch",
        26,
        "gives every epoch the same order, and says nothing",
        (r"set_epoch", at("forgotten_set_epoch", 14)),
    ),
    Demo(
        "no_sampler",
        "There is no DistributedSampler",
        27,
        "trains every rank on the same samples, and says nothing",
        (r"Ranks 0, 1", r"DistributedSampler", at("no_sampler", 14)),
    ),
    Demo(
        "padded_sampler",
        "11 samples on 2 ranks",
        27,
        "trains on one sample twice per epoch, and says nothing: nor does lockstep, as it is what most programs do",
        quiet=True,
    ),
    Demo(
        "nan_on_one_rank",
        "A NaN in a batch of rank 1",
        28,
        "has NaN on all ranks a step later, and says nothing",
        (r"rank 1", r"weight", r"NaN", at("nan_on_one_rank", 14)),
    ),
    Demo(
        "batch_norm_buffers",
        "The averages of BatchNorm differ, as they are not broadcast",
        29,
        "evaluates a different model on each rank, and says nothing",
        (r"BUFFERS differ on ranks 0,1", r"1\.running_var", at("batch_norm_buffers", 11)),
    ),
    Demo(
        "changed_in_flight",
        "Rank 1 overwrites a tensor that is being reduced",
        30,
        f"{_GARBAGE}: a mix of 2.0 and 6.0",
        (r"rank 1", at("changed_in_flight", 11)),
        variables=_CHECK,
    ),
    Demo(
        "read_in_flight",
        "A result is used before wait()",
        30,
        f"{_GARBAGE}: a mix of 1.0 and 1.5",
        (at("read_in_flight", 11),),
        variables=_CHECK,
    ),
    Demo(
        "same_path",
        "Every rank saves to the same path",
        31,
        "keeps what the last one wrote, and says nothing",
        (r"ranks 0,1|rank 1", r"checkpoint\.pt", at("same_path", 16)),
    ),
)

_ENDINGS = (
    Demo(
        "killed",
        "Rank 1 is killed with SIGKILL",
        32,
        "the other rank says 'Connection reset by peer'; torchrun names rank 1 and the signal",
        (r"rank 1 \(pid \d+\) was killed by SIGKILL", at("killed", 14)),
    ),
    Demo(
        "stopped",
        "Rank 1 is stopped, as a frozen machine would be",
        33,
        _BLOCKED,
        (r"STOPPED.*Culprit: rank 1", r"stopped by a signal", at("stopped", 14)),
    ),
    Demo(
        "exception",
        "Rank 1 raises",
        34,
        f"prints the traceback of rank 1; {_CLOSED}",
        (r"rank 1 raised at .*" + at("exception", 10), r"ValueError: label 7 is not one of 0 to 4"),
    ),
    Demo(
        "exception_kept_alive",
        "Rank 1 raises, and a thread keeps its process alive",
        35,
        f"rank 0 {_BLOCKED}",
        (r"RAISED.*Culprit: rank 1", r"rank 1 raised at .*" + at("exception_kept_alive", 15)),
    ),
    Demo("no_teardown", "Nobody calls destroy_process_group", 43, "is mostly fine, and so is lockstep", quiet=True),
)

_ENVIRONMENT = (
    Demo(
        "absent_rank",
        "WORLD_SIZE=3, and two processes are started",
        36,
        "'wait timeout after 1800000ms, keys: /default_pg/0//cpu//0/0', without a rank",
        (r"waiting for rank 2 at .*; seen: rank 0 on .*, rank 1 on ",),
        places=(Place("0", "3"), Place("1", "3")),
    ),
    Demo(
        "other_world_size",
        "WORLD_SIZE is 2 on rank 0 and 3 on rank 1",
        37,
        "each waits 30 minutes for another number of ranks",
        (r"rank 0 on .* was started with 2 and rank 1 .* with 3|rank 1 on .* with 3 and rank 0 .* with 2",),
        places=(Place("0"), Place("1", "3")),
    ),
    Demo(
        "same_rank_twice",
        "Two processes are both rank 0",
        38,
        "socket errors: 'EADDRINUSE'",
        (r"rank 0 was claimed twice .*by pid \d+ on .* and by pid \d+",),
        places=(Place("0"), Place("0")),
    ),
    Demo(
        "rank_too_large",
        "RANK=2 with WORLD_SIZE=2",
        39,
        "'rank < size. 2 vs 2' on that one; the other waits 30 minutes",
        (r"RANK=2", r"meet\.py\W+line 7"),
        places=(Place("0"), Place("2")),
    ),
    Demo(
        "wrong_port",
        "Rank 1 is told another MASTER_PORT",
        40,
        "two tries of 30 minutes, then C++ frames and 'client socket has timed out'",
        (r"rank 1 waits for rank 0 at .*refuses connections",),
        places=(Place("0"), Place("1", port="other")),
    ),
    Demo(
        "foreign_port",
        "Another program listens on MASTER_PORT",
        41,
        "EADDRINUSE on rank 0; the others hang for ever without an error",
        (r"rank 1: port \d+ of 127.0.0.1 answers, but no torch store replies: another program",),
        places=(Place("0", port="foreign"), Place("1", port="foreign")),
    ),
    Demo(
        "unset_variables",
        "MASTER_ADDR and WORLD_SIZE are not set",
        42,
        "ValueError for the first of them; the others wait 30 minutes",
        (r"WORLD_SIZE", r"MASTER_ADDR", r"meet\.py\W+line 7"),
        places=(Place("0", None, None), Place("1", None, None)),
    ),
)

DEMOS: Mapping[str, Demo] = {
    demo.name: demo
    for demo in sorted((*_MISMATCHED, *_MODELS, *_REPLICAS, *_DATA, *_ENDINGS, *_ENVIRONMENT), key=lambda d: d.row)
}
