"""The gallery: which fault each program here has, how stock torch takes it, and what lockstep has to say of it.

A row is one of the table of failures in docs/diagnosis.md; several demos may vary one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

HANG_S = "2"  # LOCKSTEP_HANG_S, of all of them
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """What one process of a demo of the environment is told of its place in the job."""

    rank: str | None = None
    world_size: str | None = "2"
    address: str | None = "127.0.0.1"
    port: str = "own"  # "own": a free one; "other": another free one; "foreign": one where another program listens

    def variables(self, ports: Mapping[str, str]) -> dict[str, str]:
        """What a launcher would have set, as far as this says it. ports: by `port`."""
        said = (self.rank, self.rank, self.world_size, self.address, ports[self.port])
        return {name: value for name, value in zip(_VARIABLES, said, strict=True) if value is not None}


@final
@dataclass(frozen=True)
class Demo:
    """One program with a fault.

    says: regular expressions that lockstep's output has to match: the culprit's rank, the cause, and the line.
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

    def command(self, *, stock: bool) -> str:
        """What starts one side, as one would type it; where there is no launcher, a line for each process."""
        name = (self.stock_script if stock else self.script).name
        if self.places:
            ports = {"own": "29500", "other": "29501", "foreign": "29502"}  # as those of a run, which are free ones
            each = (" ".join(map("=".join, place.variables(ports).items())) for place in self.places)
            lines = [f"{variables} python {name}" for variables in each]
            note = f" (another program listens on port {ports['foreign']})" * ("foreign" in str(self.places))
            return "\n    ".join([f"{'stock torch' if stock else 'lockstep'}, {len(lines)} processes{note}:", *lines])
        if stock:
            return f"torchrun --nproc-per-node {self.ranks} {name}"
        settings = [f"{name}={value}" for name, value in {"LOCKSTEP_HANG_S": HANG_S, **self.variables}.items()]
        return f"lockstep run --nproc-per-node {self.ranks} {name}, with {' '.join(settings)}"

    @property
    def source(self) -> str:
        """The program, below what it is started with."""
        above = f"{self.script}\n{self.command(stock=False)}".splitlines()
        return "".join(f"# {line}\n" for line in above) + self.script.read_text()


_GARBAGE = "goes on with garbage, and says nothing"
_BLOCKED = "waits 30 minutes, then says 'Timed out waiting 1800000ms' without a rank"
_BLOCKED_ANYWAY = "waits 30 minutes, whatever timeout the job was given"
_CLOSED = "the other rank says 'Connection closed by peer' (or 'reset'), not who or why"
_SHIFTED = f"pairs step i with step i + 1: {_GARBAGE}, until {_CLOSED}"
_ABORTED = "one rank is ended by SIGABRT from C++, without a Python traceback; the other says 'Connection reset'"
_DRIFT = "trains on with a different model on each rank, and says nothing"
_CHECK: Mapping[str, str] = {"LOCKSTEP_GUARD": "check"}
_BOTH = "Culprits: ranks 0,1"
_SUM = r"all_reduce float32 \[4\] sum"


def at(name: str, line: int) -> str:
    """A line of the program `name`, as a report names it."""
    return rf"\b{name}\.py:{line}\b"


def _differ(name: str, title: str, row: int, stock: str, what: str, *calls: tuple[str, int]) -> Demo:
    """Two calls, by what they are and their lines, that differ in `what`: with two ranks, either may be right."""
    each = (rf"rank {rank}: {call} at .*{at(name, line)}" for rank, (call, line) in enumerate(calls))
    return Demo(name, title, row, stock, (rf"MISMATCH in step 1, .*{_BOTH}", rf"they differ in {what}\n", *each))


def _models(name: str, title: str, row: int, stock: str, line: int, what: str) -> Demo:
    """Models that differ in `what`, wrapped at `line`."""
    return Demo(name, title, row, stock, (rf"MODELS differ.*{_BOTH}", what, rf"wrapped at .*{at(name, line)}"))


_MISMATCHED = (
    Demo(
        "skipped_collective", "Rank 1 leaves out one of many equal collectives", 1, _SHIFTED,
        ("MISMATCH in step 20.*Culprit: rank 1", rf"rank 1 skipped all_reduce .*{at('skipped_collective', 19)}"),
    ),
    Demo(
        "missing_collective", "Rank 1 is busy elsewhere and never comes to the last collective", 2, _BLOCKED,
        (
            r"HANG.* in step 1\..*Culprit: rank 1",
            rf"rank 1 is not there: at .*{at('missing_collective', 13)} load_batch",
            rf"rank 0 waits in {_SUM} #4 .*{at('missing_collective', 19)}",
        ),
    ),
    Demo(
        "early_exit", "Only rank 0 calls barrier; rank 1 comes to its end", 3, f"{_CLOSED}; torchrun blames rank 0",
        (
            r"FINISHED too early, in step 1\..*Culprit: rank 1",
            "rank 1 finished normally.* after 1 collective,",
            rf"rank 0 wanted a 2nd \(barrier, .*{at('early_exit', 10)}",
        ),
    ),
    _differ(
        "different_collectives", "all_reduce on rank 0, broadcast on rank 1", 4, _BLOCKED, "kind",
        (_SUM, 10), (r"broadcast float32 \[4\] root=0", 12),
    ),
    _differ(
        "gather_against_reduce", "all_reduce on rank 0, all_gather on rank 1", 4, _BLOCKED, "kind",
        (_SUM, 10), (r"all_gather float32 \[4\]", 12),
    ),
    _differ(
        "barrier_against_reduce", "all_reduce on rank 0, barrier on rank 1", 4, _BLOCKED, "kind",
        (_SUM, 11), ("barrier", 9),
    ),
    _differ(
        "object_against_tensor", "all_gather_object on rank 0, all_reduce on rank 1", 4, _BLOCKED, "kind",
        (r"all_gather int64 \[1\]", 9), (_SUM, 11),
    ),
    _differ(
        "different_sizes", "10 elements on rank 0, 20 on rank 1", 5, _ABORTED, "shape",
        (r"all_reduce float32 \[10\] sum", 8), (r"all_reduce float32 \[20\] sum", 8),
    ),
    _differ(
        "different_sizes_gathered", "all_gather of 4 elements on rank 0, of 6 on rank 1", 5,
        "rank 0 is ended by SIGABRT from C++, without a Python traceback; rank 1 says nothing", "shape",
        (r"all_gather float32 \[4\]", 9), (r"all_gather float32 \[6\]", 9),
    ),
    _differ(
        "different_shapes", "Shape (2, 3) on rank 0, (3, 2) on rank 1", 6, _GARBAGE, "shape",
        (r"all_reduce float32 \[2, 3\] sum", 11), (r"all_reduce float32 \[3, 2\] sum", 11),
    ),
    _differ(
        "short_broadcast", "Rank 0 broadcasts 10 elements into 20 of rank 1", 7,
        "leaves the tail of the tensor as it was, and says nothing", "shape",
        (r"broadcast float32 \[10\] root=0", 11), (r"broadcast float32 \[20\] root=0", 11),
    ),
    _differ(
        "different_dtypes", "float32 on rank 0, int32 on rank 1", 8,
        "adds the bits of floats to integers: 1065353216; says nothing", "dtype",
        (_SUM, 11), (r"all_reduce int32 \[4\] sum", 11),
    ),
    _differ(
        "different_halves", "bfloat16 on rank 0, float16 on rank 1", 8,
        "makes 24.0 and 1.876 of 1 + 1; says nothing", "dtype",
        (r"all_reduce bfloat16 \[4\] sum", 11), (r"all_reduce float16 \[4\] sum", 11),
    ),
    _differ(
        "wider_dtype", "float32 on rank 0, float64 on rank 1", 9, _ABORTED, "dtype",
        (_SUM, 8), (r"all_reduce float64 \[4\] sum", 8),
    ),
    _differ(
        "different_reductions", "A sum on rank 0, a maximum on rank 1", 10, _GARBAGE, "reduction",
        (_SUM, 11), (r"all_reduce float32 \[4\] max", 11),
    ),
    _differ(
        "own_roots", "Every rank broadcasts from itself", 11, _BLOCKED, "root",
        (r"broadcast float32 \[4\] root=0", 8), (r"broadcast float32 \[4\] root=1", 8),
    ),
    Demo(
        "both_receive", "Both ranks wait for a message of the other", 12, _BLOCKED,
        (
            "DEADLOCK in step 1: rank 0 -> rank 1 -> rank 0",
            rf"rank 0 waits in recv .* from rank 1 tag 0, .*{at('both_receive', 9)}",
            rf"rank 1 waits in recv .* from rank 0 tag 0, .*{at('both_receive', 9)}",
        ),
    ),
    Demo(
        "groups_in_other_order", "Two groups of the same ranks, used in opposite order", 13, _BLOCKED_ANYWAY,
        (
            "DEADLOCK in step 1: groups in different order, or a call left out: rank 0 -> rank 1 -> rank 0",
            rf"rank 0 waits in {_SUM} #0 of group 1 .*{at('groups_in_other_order', 10)}",
            rf"rank 1 waits in {_SUM} #0 of group 2 .*{at('groups_in_other_order', 10)}",
        ),
    ),
    Demo(
        "group_on_one_rank", "Only rank 0 makes a group, which every rank has to do", 13, _BLOCKED_ANYWAY,
        (
            r"HANG.* in step 1\..*Culprit: rank 1",
            rf"rank 0 waits in new_group .*{at('group_on_one_rank', 10)}",
            rf"rank 1 is not there: at .*{at('group_on_one_rank', 12)}",
        ),
    ),
)  # fmt: skip

_MODELS = (
    _models(
        "frozen_before", "Rank 1 freezes a layer, and the model is wrapped", 14,
        "'Rank 0 has 4 params, while rank 1 has inconsistent 3 params', without a name", 11,
        "rank 1 has parameter '0.weight' with requires_grad False, rank 0 with requires_grad True",
    ),
    Demo(
        "frozen_after", "The model is wrapped, and rank 1 freezes a layer", 15,
        f"one step is not averaged; then rank 1 says 'Expected to have finished reduction', and {_CLOSED}",
        (r"FROZEN.* in step 1\..*Culprit: rank 1", r"rank 1 froze 0\.weight", rf"seen at .*{at('frozen_after', 14)}"),
    ),
    _models(
        "frozen_differently", "Each rank freezes another parameter of the same shape", 16,
        "averages the gradients of two different parameters, and says nothing", 10,
        "rank 1 has parameter '0.weight' with requires_grad True, rank 0 with requires_grad False",
    ),
    _models(
        "wider_layer", "The hidden layer of rank 1 is wider", 17,
        f"rank 1 names an index and its own sizes; {_CLOSED}", 10,
        r"rank 1 has parameter '0.weight' with shape \[16, 4\], rank 0 with shape \[8, 4\]",
    ),
    _models(
        "extra_layer", "The model of rank 1 has one layer more", 17,
        "'Rank 0 has 4 params, while rank 1 has inconsistent 6 params', without a name", 9,
        "rank 1 has parameter '2.weight', which rank 0 lacks",
    ),
    _models(
        "other_order", "Rank 1 registers the same layers in another order", 18,
        "swaps the two layers of rank 1, and says nothing", 22,
        "rank 1 has parameter 'b.weight' where rank 0 has parameter 'a.weight'",
    ),
    Demo(
        "other_seed", "Each rank has its own seed, and gradients are averaged by hand", 19, _DRIFT,
        (
            f"REPLICAS differ after step 1, .*{_BOTH}",
            r"parameter 'weight' is \w+ on rank 0, \w+ on rank 1",
            rf"ranks 0,1: optimizer made at .*{at('other_seed', 12)}",
        ),
    ),
)  # fmt: skip

_REPLICAS = (
    Demo(
        "past_ddp", "The model within DDP is called: ddp.module(x)", 20, _DRIFT,
        (
            rf"REPLICAS differ after step 20, equal after step 8\..*{_BOTH}",
            r"parameter 'weight' is \w+ on rank 0, \w+ on rank 1",
            rf"in step 20 a backward went past .*{at('past_ddp', 15)}",
        ),
    ),
    Demo(
        "step_on_one_rank", "Rank 1 leaves out one optimizer step", 20, _DRIFT,
        ("STEPS differ since step 20.*Culprit: rank 1", rf"rank 1 did not call .*{at('step_on_one_rank', 14)}"),
    ),
    Demo(
        "other_learning_rate", "Rank 1 has another learning rate", 20, _DRIFT,
        (
            f"REPLICAS differ after step 1.*{_BOTH}",
            "lr of parameter group 0 is 0.1 on rank 0, 0.01 on rank 1",
            rf"optimizer made at .*{at('other_learning_rate', 11)}",
        ),
    ),
    Demo(
        "flipped_bit", "One bit of a weight flips on rank 1", 20, _DRIFT,
        (
            rf"REPLICAS differ after step 128, equal after step 8\..*{_BOTH}",
            r"'1.weight' is \w+ on rank 0, \w+ on rank 1",
            rf"optimizer\.step\(\) at .*{at('flipped_bit', 14)}",
        ),
    ),
    Demo(
        "skipped_batch", "Rank 1 catches an exception and skips a batch", 21, _SHIFTED,
        ("MISMATCH in step 20.*Culprit: rank 1", rf"rank 1 skipped collective .*{at('skipped_batch', 16)}"),
    ),
    Demo(
        "no_sync_on_one_rank", "Rank 1 alone is in no_sync() for one step", 21, _SHIFTED,
        (
            "NO_SYNC.*in step 20.*Culprit: rank 1",
            r"rank 1 ran 1 backward in no_sync\(\).*\bno_sync_on_one_rank\.py:1[56]\b",
        ),
    ),
    Demo(
        "unused_parameter", "A layer of the model is never used", 22,
        "one step is not averaged; then a long text with indices of parameters",
        (
            "UNUSED parameters seen in step 2, on every rank",
            r"no rank used forgotten\.weight, forgotten\.bias",
            rf"the forward is called at .*{at('unused_parameter', 21)}",
        ),
    ),
    Demo(
        "unused_branch", "Rank 1 alone does not use a branch of the model", 23,
        f"rank 1 says 'Expected to have finished reduction', and {_CLOSED}",
        (
            "UNUSED parameters seen in step 2, .*Culprit: rank 1",
            r"rank 1 did not use b\.weight, b\.bias",
            rf"the forward is called at .*{at('unused_branch', 22)}",
        ),
    ),
    Demo(
        "fewer_batches", "Rank 1 has one batch less", 24, _CLOSED,
        (r"FINISHED too early, in step 5\..*Culprit: rank 1", rf"rank 0 wanted a 10th \(.*{at('fewer_batches', 11)}"),
    ),
    Demo(
        "uneven_join", "Rank 1 has one batch less, and join() sees to it", 25, "is fine, and so is lockstep", quiet=True
    ),
)  # fmt: skip

_DATA = (
    Demo(
        "forgotten_set_epoch", "Nobody calls sampler.set_epoch", 26,
        "gives every epoch the same order, and says nothing",
        (
            "DATA: the samples come in the order of the last pass",
            rf"in pass 2 of the loop at .*{at('forgotten_set_epoch', 14)}",
        ),
    ),
    Demo(
        "no_sampler", "There is no DistributedSampler", 27, "trains every rank on the same samples, and says nothing",
        (
            "Ranks 0, 1 got the very same first batch",
            "DistributedSampler",
            rf"in pass 1 of the loop at .*{at('no_sampler', 14)}",
        ),
    ),
    Demo(
        "seed_by_rank", "Each rank shuffles all samples by a seed of its own", 27,
        "trains on every sample twice per epoch, and says nothing",
        (
            "DATA: ranks each read the whole dataset",
            rf"in the loop at .*{at('seed_by_rank', 15)}",
            "ranks 0, 1: each goes over all 64 samples in an order of its own: every sample counts 2 times",
        ),
    ),
    Demo(
        "padded_sampler", "11 samples on 2 ranks", 27,
        "trains on one sample twice per epoch, and says nothing: nor does lockstep, as it is what most programs do",
        quiet=True,
    ),
    Demo(
        "nan_on_one_rank", "A NaN in a batch of rank 1", 28, "has NaN on all ranks a step later, and says nothing",
        (
            "NOT FINITE gradients in step 3.*Culprit: rank 1",
            rf"rank 1: the loss is not finite at .*{at('nan_on_one_rank', 14)}",
            "'weight' .*NaN",
        ),
    ),
    Demo(
        "batch_norm_buffers", "The averages of BatchNorm differ, as they are not broadcast", 29,
        "evaluates a different model on each rank, and says nothing",
        ("BUFFERS differ on ranks 0,1", r"'1\.running_var'", rf"wrapped at .*{at('batch_norm_buffers', 11)}"),
    ),
    Demo(
        "changed_in_flight", "Rank 1 overwrites a tensor that is being reduced", 30,
        f"{_GARBAGE}: a mix of 2.0 and 6.0",
        (rf"{at('changed_in_flight', 11)}.* rank 1: its .* was changed while the operation was under way",),
        variables=_CHECK,
    ),
    Demo(
        "read_in_flight", "A result is used before wait()", 30, f"{_GARBAGE}: mostly a mix of 1.0 and 1.5",
        (rf"{at('read_in_flight', 11)}.* rank [01]: its .* was changed while the operation was under way",),
        variables=_CHECK,
    ),
    Demo(
        "same_path", "Every rank saves to the same path", 31, "keeps what the last one wrote, and says nothing",
        (
            rf"SAVE: ranks 0,1 wrote one file.*{at('same_path', 16)}",
            r"ranks 0, 1 write the same file\s[^:]*\bcheckpoint\.pt:",
        ),
    ),
)  # fmt: skip

_ENDINGS = (
    Demo(
        "killed", "Rank 1 is killed with SIGKILL", 32,
        "the other rank says 'Connection reset by peer'; torchrun names rank 1 and the signal",
        (
            r"GONE in step 1\..*Culprit: rank 1",
            r"rank 1 \(pid \d+\) was killed by SIGKILL",
            rf"rank 1 was last seen .* ago.*\n +issued last: {_SUM} #499 .*{at('killed', 14)}",
        ),
    ),
    Demo(
        "stopped", "Rank 1 is stopped, as a frozen machine would be", 33, _BLOCKED,
        (r"STOPPED in step 1\..*Culprit: rank 1", "by a signal", rf"rank 0 waits in {_SUM} #500 .*{at('stopped', 14)}"),
    ),
    Demo(
        "exception", "Rank 1 raises", 34, f"prints the traceback of rank 1; {_CLOSED}",
        (
            r"RAISED in step 1\..*Culprit: rank 1",
            rf"rank 1 raised at .*{at('exception', 10)}",
            "ValueError: label 7 is not one of 0 to 4",
        ),
    ),
    Demo(
        "exception_kept_alive", "Rank 1 raises, and a thread keeps its process alive", 35, f"rank 0 {_BLOCKED}",
        (
            r"RAISED in step 1\..*Culprit: rank 1",
            rf"rank 1 raised at .*{at('exception_kept_alive', 15)}",
            "ValueError: label 7 is not one of 0 to 4",
        ),
    ),
    Demo("no_teardown", "Nobody calls destroy_process_group", 43, "is mostly fine, and so is lockstep", quiet=True),
)  # fmt: skip

_ENVIRONMENT = (
    Demo(
        "absent_rank", "WORLD_SIZE=3, and two processes are started", 36,
        "'wait timeout after 1800000ms, keys: /default_pg/0//cpu//0/0', without a rank",
        (
            r"waiting for (?:rank 2 at .*; seen: rank 0 on .*, rank 1|ranks 1, 2 at .*; seen: rank 0) on ",
            "rank 2 never arrived at .* in 4 s; seen: rank 0 on .*, rank 1 on .* Look at the output of rank 2",
        ),
        places=(Place("0", "3"), Place("1", "3")),
    ),
    Demo(
        "other_world_size", "WORLD_SIZE is 2 on rank 0 and 3 on rank 1", 37,
        "each waits 30 minutes for another number of ranks",
        ("rank 0 on .* was started with 2 and rank 1 .* with 3|rank 1 on .* with 3 and rank 0 .* with 2",),
        places=(Place("0"), Place("1", "3")),
    ),
    Demo(
        "same_rank_twice", "Two processes are both rank 0", 38, "socket errors: 'EADDRINUSE'",
        (r"rank 0 was claimed twice .*by pid \d+ on .* and by pid \d+",),
        places=(Place("0"), Place("0")),
    ),
    Demo(
        "rank_too_large", "RANK=2 with WORLD_SIZE=2", 39,
        "'rank < size. 2 vs 2' on that one; the other waits 30 minutes",
        (r"RANK=2, but WORLD_SIZE=2: ranks are 0 to 1", r"meet\.py\W+line 7"),
        places=(Place("0"), Place("2")),
    ),
    Demo(
        "wrong_port", "Rank 1 is told another MASTER_PORT", 40,
        "two tries of 30 minutes, then C++ frames and 'client socket has timed out'",
        (
            "rank 1 waits for rank 0 at .*refuses connections",
            "rank 0 is not at .*: .* refuses connections .* was given another address or port",
            "rank 1 never arrived at .*; seen: rank 0 on ",
        ),
        places=(Place("0"), Place("1", port="other")),
    ),
    Demo(
        "foreign_port", "Another program listens on MASTER_PORT", 41,
        "EADDRINUSE on rank 0; the others hang for ever without an error",
        (
            r"rank 1: port \d+ of 127.0.0.1 answers, but no torch store replies: another program",
            r"rank 0 must open port \d+ of 127.0.0.1, but it is in use by another program: .* Choose another port",
            r"1\. port \d+ of 127.0.0.1 answers, but is not this job: .* Choose another port",
        ),
        places=(Place("0", port="foreign"), Place("1", port="foreign")),
    ),
    Demo(
        "unset_variables", "MASTER_ADDR and WORLD_SIZE are not set", 42,
        "ValueError for the first of them alone",
        ("WORLD_SIZE is not set", "MASTER_ADDR is not set", r"meet\.py\W+line 7"),
        places=(Place("0", None, None), Place("1", None, None)),
    ),
)  # fmt: skip

DEMOS: Mapping[str, Demo] = {
    demo.name: demo
    for demo in sorted((*_MISMATCHED, *_MODELS, *_REPLICAS, *_DATA, *_ENDINGS, *_ENVIRONMENT), key=lambda d: d.row)
}
