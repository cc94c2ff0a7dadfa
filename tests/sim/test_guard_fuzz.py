"""Random training programs under real guards: not a word of them as they are, and with one line that only one rank
runs otherwise, that rank and that line.

The programs are Python that a user may have written: `Ended.text` and the source are all one needs to see a failure.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from guarded_threads import HANG_S, Ended, Job, certain, strangers
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from lockstep.errors import PeerFailed
from lockstep.observe.wording import Finding

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

FILE = "train.py"
SHAPES = ("4", "2, 2", "0", "7", "1, 4", "3, 1")
MOST_RANKS = 6
BOUND_S = 3.0  # within which what can be known is said


class Line(NamedTuple):
    """One line of the program."""

    group: str
    code: str  # with {group}, {size} for the number of its ranks


class Program(NamedTuple):
    size: int
    groups: dict[str, tuple[int, ...]]  # without the world
    body: list[Line]  # of every step
    seldom: list[Line]  # of every third one too
    steps: int
    is_lenient: bool
    notices: bool
    seed: int
    begun: int = 0  # steps that an earlier start has done

    def members(self, group: str) -> tuple[int, ...]:
        return self.groups.get(group, tuple(range(self.size)))


@st.composite
def operations(draw: st.DrawFn, groups: dict[str, tuple[int, ...]], size: int, least: int = 1) -> list[Line]:
    found = []
    for _ in range(draw(st.integers(least, 4))):
        group = draw(st.sampled_from(["world", "world", *groups]))
        members = len(groups.get(group, range(size)))
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float32", "float64", "int32"]))
        tensor = f"torch.ones({shape}, dtype=torch.{dtype})"
        reduce, root = draw(st.sampled_from(["sum", "max", "min"])), draw(st.integers(0, members - 1))
        code = draw(
            st.sampled_from(
                [
                    f'{{group}}.all_reduce({tensor}, "{reduce}")',
                    f'works.append({{group}}.all_reduce({tensor}, "{reduce}", async_op=True))',
                    f"{{group}}.broadcast({tensor}, {root})",
                    f'{{group}}.reduce({tensor}, {root}, "{reduce}")',
                    f"{{group}}.all_gather([{tensor} for _ in range({{size}})], {tensor})",
                    "{group}.all_gather([torch.ones(r) for r in range({size})], torch.ones({group}.rank))",
                    "{group}.barrier()",
                    "wait(works)",
                    f"sent = world.isend({tensor}, (rank + 1) % world.world_size); "
                    f"world.recv({tensor}, (rank - 1) % world.world_size); sent.wait()",
                ]
            )
        )
        found.append(Line("world" if "world." in code or code == "wait(works)" else group, code))
    return found


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(2, MOST_RANKS))
    ranks = st.sets(st.integers(0, size - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    groups = {name: draw(ranks) for name in ("few", "more")[: draw(st.integers(0, 2))]}
    body = draw(operations(groups, size))
    seldom = draw(operations(groups, size, 0))
    body.append(Line("world", '{group}.all_reduce(torch.ones(5), "mean")'))  # the gradients, of all
    body.append(Line("world", "wait(works)"))
    return Program(
        size, groups, body, seldom, draw(st.integers(5, 8)), *draw(st.tuples(st.booleans(), st.booleans())),
        draw(st.integers(0, 1 << 32)), draw(st.sampled_from([0, 0, 300])),
    )  # fmt: skip


class Written(NamedTuple):
    """A program as text."""

    text: str
    lines: dict[str, int]  # where the words are that are looked for: "odd" and the like


def written(
    program: Program,
    odd: str = "",
    at: int = 0,
    instead: bool = False,
    condition: str = "",
    *,
    steps_if: str = "True",
    end: Sequence[str] = (),
) -> Written:
    """The source. odd: what a rank of `condition` does before, or `instead` of, line `at` of the body.

    steps_if: the condition of optimizer_step(). end: lines after the loop.
    """
    rows = [
        "def train(rank, world, few, more, works, wait, optimizer_step, job):",
        f" for step in range({program.steps}):",
    ]
    lines: dict[str, int] = {}

    def add(line: Line, indent: str) -> None:
        code = line.code.format(group=line.group, size=len(program.members(line.group)))
        guarded = f"if {line.group}: {code}" if line.group in program.groups else code
        rows.append(indent + guarded)

    for number, line in enumerate(program.body):
        if number == at and condition:
            rows.append(f"  if {condition}:")
            rows.append(f"   {odd or 'pass'}")
            lines["odd"] = len(rows)
            if instead:
                rows.append("  else:")
            add(line, "   " if instead else "  ")
        else:
            add(line, "  ")
        if number == at:
            lines["line"] = len(rows)
    if program.seldom:
        rows.append("  if step % 3 == 1:")
        for line in program.seldom:
            add(line, "   ")
    rows += ["  wait(works)", "  optimizer_step()" if steps_if == "True" else f"  if {steps_if}: optimizer_step()"]
    rows += [f" {line}" for line in end]
    return Written("\n".join(rows) + "\n", lines)


def run(program: Program, source: str) -> Ended:
    space: dict[str, object] = {"torch": torch}
    exec(compile(source, str(Path.cwd() / FILE), "exec"), space)
    train = space["train"]
    assert callable(train)

    def on_rank(rank, world, groups, job):  # noqa: ANN001, ANN202
        few, more = [*groups, None, None][:2]
        works: list = []

        def wait(works: list) -> None:
            while works:
                works.pop(0).wait()

        if program.begun:
            job.guards[rank].begin_after(program.begun)
        train(rank, world, few, more, works, wait, job.guards[rank].step_done, job)

    note(source)
    job = Job(
        program.size, [*program.groups.values()], program.seed, notices=program.notices, is_lenient=program.is_lenient
    )
    with tempfile.TemporaryDirectory() as folder:
        return job.run(Path(folder), on_rank)


@settings(max_examples=30, deadline=None)
@given(programs())
def test_of_a_program_that_all_ranks_run_nothing_is_said(program: Program) -> None:
    ended = run(program, written(program).text)
    assert (ended.text, ended.errors) == ("", {})


Fault = Literal["skip", "extra", "change", "nap", "sleep", "raise", "return", "freeze"]
_OTHERS = [
    ('"mean"', '"sum"'), ('"sum"', '"max"'), ('"max"', '"min"'), ('"min"', '"sum"'), ("float32", "int32"),
    ("float64", "float32"), ("int32", "float64"), ("ones(4", "ones(5"), ("ones(2, 2", "ones(4"), ("ones(0", "ones(1"),
    ("ones(7", "ones(6"), ("ones(1, 4", "ones(4, 1"), ("ones(3, 1", "ones(3"),
    ("(r) for r in range({size})], torch.ones({group}.rank)", "(2) for _ in range({size})], torch.ones(2)"),
]  # fmt: skip


def changes(code: str) -> list[str]:
    """The same call with one thing different, or another one."""
    sizes_alone = "all_gather" in code  # count, and not how a tensor of that size is shaped
    others = [(old, new) for old, new in _OTHERS if not (sizes_alone and re.match(r"ones\(.*,", old))]
    found = [code.replace(old, new) for old, new in others if old in code]
    found += [re.sub(r"\), (\d)", lambda m: f"), {int(m[1] == '0')}", code)] * bool(re.search(r"\), \d", code))
    return [*found, "{group}.all_reduce(torch.ones(9))" if "barrier" in code else "{group}.barrier()"]


class Drawn(NamedTuple):
    program: Program
    fault: Fault
    guilty: int
    members: tuple[int, ...]  # with whom it cannot go on
    source: Written


@st.composite
def faults(draw: st.DrawFn, *kinds: Fault) -> Drawn:
    """A program in which one rank does something else in one step."""
    program, fault = draw(programs()), draw(st.sampled_from(kinds))
    calls = [n for n, line in enumerate(program.body) if "isend" not in line.code and line.code != "wait(works)"]
    at = draw(st.sampled_from(calls))
    line = program.body[at]
    members = program.members(line.group)
    guilty, step = draw(st.sampled_from(members)), draw(st.integers(1, program.steps - 2))
    odd = {
        "skip": "pass",
        "extra": draw(st.sampled_from(["{group}.barrier()", "{group}.all_reduce(torch.ones(9))", line.code])),
        "change": draw(st.sampled_from(changes(line.code))),
        "nap": f"job.sleep({0.8 * HANG_S})",
        "sleep": "job.sleep(8)",
        "raise": "raise ValueError('label 7')",
        "return": "return",
        "freeze": "job.freeze()",
    }[fault].format(group=line.group, size=len(members))
    is_instead = fault in ("skip", "change")
    condition = f"rank == {guilty} and step == {step} and job.fault()"
    return Drawn(program, fault, guilty, members, written(program, odd, at, is_instead, condition))


def first_of(ended: Ended, drawn: Drawn) -> Finding:
    """What was said first, and in time."""
    note(ended.text)
    assert certain(ended), (ended, "nothing was said")
    found = certain(ended)[0]
    said_s = next(said.at_s for said in ended.said if said.finding == found)
    bound_s = HANG_S + 1 if found.kind in ("cycle", "hang") else BOUND_S + 0.5
    assert said_s - ended.fault_s <= bound_s, (said_s, ended.fault_s)
    assert not strangers(ended), strangers(ended)
    event(found.kind)
    return found


@settings(max_examples=60, deadline=None)
@given(faults("skip", "extra", "change"))
def test_a_rank_that_makes_other_calls_is_named(drawn: Drawn) -> None:
    ended = run(drawn.program, drawn.source.text)
    where = drawn.source.lines["line" if drawn.fault == "skip" else "odd"]
    if not ended.said:  # all have come to their end before anybody looked: the last one raises it
        assert ended.errors, "nothing was said"
        assert all(f"train.py:{where} " in str(error) for error in ended.errors.values()), ended.errors
        return
    found = first_of(ended, drawn)
    assert drawn.guilty in found.culprits, found.text
    if found.kind in (
        "cycle",
        "hang",
    ):  # it went on to another group or to a message: all that is known is who waits where
        return
    if re.search(r"^    ranks ", found.text, re.MULTILINE):  # two at least had come to it alike
        assert found.culprits == (drawn.guilty,), found.text
    assert f"train.py:{where} " in found.text, (where, found.text)


@settings(max_examples=30, deadline=None)
@given(faults("raise", "return"))
def test_of_a_rank_that_leaves_its_last_words_are_quoted(drawn: Drawn) -> None:
    ended = run(drawn.program, drawn.source.text)
    own = ended.errors.pop(drawn.guilty, None)
    assert isinstance(own, ValueError) == (drawn.fault == "raise"), own
    assert ended.errors, "nobody minds"
    line = drawn.source.lines["odd"]
    words = rf"raised at train\.py:{line}\b.*\bValueError: label 7" if own else "finished normally"
    for error in ended.errors.values():
        assert isinstance(error, PeerFailed), error
        assert re.search(rf"\brank {drawn.guilty} {words}", str(error), re.DOTALL), error
    for found in certain(ended):
        assert found.culprits == (drawn.guilty,), found.text


@settings(max_examples=30, deadline=None)
@given(faults("sleep", "freeze"))
def test_a_rank_that_stands_still_is_named(drawn: Drawn) -> None:
    ended = run(drawn.program, drawn.source.text)
    found = first_of(ended, drawn)
    assert (found.kind, found.culprits) == ({"sleep": "hang", "freeze": "stopped"}[drawn.fault], (drawn.guilty,))
    where = drawn.source.lines["odd"]
    assert drawn.fault == "freeze" or re.search(rf"\brank {drawn.guilty} .*train\.py:{where}\b", found.text), found.text
    assert drawn.fault == "freeze" or not ended.errors  # it went on


@settings(max_examples=20, deadline=None)
@given(faults("nap"))
def test_nothing_is_said_of_a_rank_that_is_late(drawn: Drawn) -> None:
    ended = run(drawn.program, drawn.source.text)
    assert (ended.text, ended.errors) == ("", {})


@settings(max_examples=20, deadline=None)
@given(programs().filter(lambda program: bool(program.groups)), st.data())
def test_a_rank_that_uses_two_groups_in_the_other_order_is_named(program: Program, data: st.DataObject) -> None:
    members = program.groups["few"]
    guilty, step = data.draw(st.sampled_from(members)), data.draw(st.integers(0, program.steps - 2))
    usual = Line("world", "world.all_reduce(torch.ones(4)); few and few.barrier()")
    both = program._replace(body=[usual, *program.body])
    condition = f"rank == {guilty} and step == {step} and job.fault()"
    source = written(both, "few.barrier(); world.all_reduce(torch.ones(4))", 0, True, condition)
    ended = run(both, source.text)
    found = certain(ended)[0]
    assert (found.kind, guilty in found.culprits) == ("cycle", True), ended.text
    assert len(members) == 2 or found.culprits == (guilty,), found.text
    assert all(f"train.py:{line} " in found.text for line in source.lines.values()), found.text


@settings(max_examples=20, deadline=None)
@given(programs(), st.data())
def test_a_last_step_that_one_rank_leaves_out_is_named(program: Program, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, program.size - 1))
    end = data.draw(st.sampled_from([[], ["world.barrier()"], ["job.sleep(rank)"]]))
    skips = f"rank == {guilty} and step == {program.steps - 1} and job.fault()"
    ended = run(program, written(program, steps_if=f"not ({skips})", end=end).text)
    assert [(found.kind, found.culprits) for found in certain(ended)] == [("steps", (guilty,))], ended.text
    assert f"STEPS differ since step {program.begun + program.steps}," in ended.text
    assert not ended.errors


ENDINGS = (
    "{one} and optimizer_step()",  # it trains its copy for itself
    "{one} and job.sleep(2)",  # it evaluates
    "world.barrier(); {one} and optimizer_step()",
    "world.all_reduce(torch.ones(1)); {one} and (optimizer_step(), optimizer_step())",
    "optimizer_step()",
    "job.sleep(rank / 2)",
)


@settings(max_examples=20, deadline=None)
@given(programs(), st.booleans(), st.lists(st.sampled_from(ENDINGS), max_size=2), st.data())
def test_nothing_is_said_of_what_ranks_do_after_the_last_step(
    program: Program, steps: bool, lines: list[str], data: st.DataObject
) -> None:
    """Also where none of them takes it, as in a test of what a step costs."""
    one = f"rank == {data.draw(st.integers(0, program.size - 1))}"
    alone = [line for line in lines if "{one} and" in line and "optimizer" in line]
    if alone and (len(alone) > 1 or lines[-1] != alone[0]):
        lines = alone[:1]  # it does not go on with the others
    steps_if = "True" if steps else f"step < {program.steps - 1}"
    source = written(program, steps_if=steps_if, end=[line.format(one=one) for line in lines])
    if not steps and alone:
        return  # then that is the step which the others left out
    ended = run(program, source.text)
    assert (ended.text, ended.errors) == ("", {})


@settings(max_examples=20, deadline=None)
@given(programs(), st.data())
def test_an_old_message_hides_no_deadlock(program: Program, data: st.DataObject) -> None:
    """One that has arrived, and that its sender has never waited for."""
    step = data.draw(st.integers(1, program.steps - 1))
    first, second = data.draw(st.permutations(range(program.size)))[:2]
    tag = data.draw(st.integers(0, 2))
    number = data.draw(st.integers(1, 2))  # of them
    sends = f"job.kept.extend(world.isend(torch.ones(2), {second}, {tag}) for _ in range({number}))"
    gets = f"[world.recv(torch.ones(2), {first}, {tag}) for _ in range({number})]"
    first_line = Line("world", f"{sends} if rank == {first} else {gets} if rank == {second} else None")
    odd = f"world.recv(torch.ones(3), {second} if rank == {first} else {first}, {tag})"
    both = program._replace(body=[first_line, *(line for line in program.body if "isend" not in line.code)])
    condition = f"rank in ({first}, {second}) and step == {step} and job.fault()"
    source = written(both, odd, 1, False, condition)
    ended = run(both, source.text)
    found = certain(ended)[0]
    assert (found.kind, {*found.culprits}) == ("cycle", {first, second}), ended.text
    said_s = next(said.at_s for said in ended.said if said.finding == found)
    assert said_s - ended.fault_s <= HANG_S + 1


@settings(max_examples=20, deadline=None)
@given(faults("skip", "extra", "change"), st.data())
def test_of_two_faults_the_first_is_named_first(drawn: Drawn, data: st.DataObject) -> None:
    """The second one is another rank's, a step later, and may be seen in the same look."""
    others = [rank for rank in range(drawn.program.size) if rank != drawn.guilty]
    other = data.draw(st.sampled_from(others))
    second = data.draw(st.sampled_from(["return", "raise ValueError('label 8')", "world.barrier()", "job.sleep(1)"]))
    first_step = int(re.findall(r"and step == (\d+) and job.fault", drawn.source.text)[0])
    head, loop, body = drawn.source.text.partition(f" for step in range({drawn.program.steps}):\n")
    text = f"{head}{loop}  if rank == {other} and step == {first_step + 1}: {second}\n{body}"
    ended = run(drawn.program, text)
    found = certain(ended)
    rows = drawn.source.text.splitlines()
    is_twice = rows[drawn.source.lines["odd"] - 1].strip() == rows[drawn.source.lines["line"] - 1].strip()
    first = [drawn.guilty]
    if is_twice and second.startswith(("return", "raise")):
        first.append(other)  # it may have left before any call was unlike: then all that is known is that it left
    if found:
        assert {*first} & {*found[0].culprits}, ended.text
        event(found[0].kind)
    else:
        named = re.compile(rf"\branks? (\d+,)*({'|'.join(map(str, first))})\b")
        assert any(named.search(str(error)) for error in ended.errors.values()), ended.errors


@settings(max_examples=20, deadline=None)
@given(programs(), st.sampled_from(["checkpoint", "evaluate"]), st.data())
def test_a_rank_that_leaves_while_another_saves_or_evaluates_is_named(
    program: Program, name: str, data: st.DataObject
) -> None:
    """And who does that is not, though all wait for it longer than for a hang."""
    guilty, busy = data.draw(st.permutations(range(program.size)))[:2]
    step = data.draw(st.integers(1, program.steps - 2))
    is_fault = data.draw(st.booleans())
    busy_s = data.draw(st.sampled_from([0.5, 1.5])) * HANG_S
    sleeps = f"job.sleep({busy_s}) if rank == {busy} and step == {step} else None"
    body = [Line("world", f"with job.guards[rank].activity('{name}'): {sleeps}"), *program.body]
    both = program._replace(body=body)
    condition = f"rank == {guilty} and step == {step} and job.fault()" if is_fault else ""
    ended = run(both, written(both, "raise ValueError('label 7')", 1, False, condition).text)
    assert [found.culprits for found in certain(ended)] in ([], [(guilty,)] * is_fault), ended.text
    if not is_fault:
        assert (certain(ended), ended.errors) == ([], {})
    else:
        ended.errors.pop(guilty)
        assert all(f"rank {guilty} " in str(error) for error in ended.errors.values()), ended.errors
        assert ended.errors
