"""What a finding says: the words are here, the reasons for them elsewhere."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, final

from lockstep import errors
from lockstep.observe.flight import Record
from lockstep.observe.replica_diff import alike
from lockstep.observe.scene import Scene, Wait
from lockstep.observe.status import Status

LINES, COLUMNS = 12, 110
_WRAPPER = textwrap.TextWrapper(COLUMNS - 6, subsequent_indent="  ", break_on_hyphens=False)  # a path stays whole
BEFORE = "before"  # topic of sentences that a rank tells of itself: what may explain why it is not with the others
_PLURALS = {"is": "are", "was": "were", "has": "have", "waits": "wait"}
NO_FAULT = "; no fault so far"  # while the operation that waits has not failed

STANDSTILLS = ("stopped", "unreachable", "hang")  # kinds of which ranks may yet go on
_MAY_PASS = ("steps", *STANDSTILLS, "transport")  # never raised; their evidence is kept
_BLAMELESS = ("cycle", "waiting", "idle", "caught")  # of which the head names the ranks, or they are all
_NOTES = ("waiting", "idle", "gradient", "data", "caught", "messages")  # that are only said

Kind = Literal[
    "mismatch",  # ranks issued different collectives
    "steps",  # the same ones, but they count their steps differently
    "raised",
    "gone",
    "finished",
    "cycle",  # ranks wait for each other
    "stopped",
    "unreachable",  # all ranks of a machine, from another one
    "hang",
    "timeout",  # torch has waited long enough for them
    "transport",  # all are there, and nothing moves; or a message that a rank has dropped
    "waiting",  # no fault: some work, the others wait for them
    "idle",  # no fault: none moves, and none waits for another
    "model",  # ranks train other parameters
    "replica",  # what was equal is not any more
    "gradient",  # not finite
    "data",
    "caught",  # an error of the ranks, by the program itself
    "messages",  # whose other half is of another size, or is missing at the end
    "guard",  # which has failed itself
]


@final
@dataclass(frozen=True)
class Finding:
    """What is wrong, and who did it."""

    kind: Kind
    culprits: tuple[int, ...]
    text: str  # at most 12 lines of 110 characters
    is_certain: bool  # results are wrong, or ranks cannot get on: to be raised; else only to be told
    key: str  # equal for the same finding, whoever makes it and when
    done: int | None = None  # steps before the one that it is about
    said_to: str = ""  # which terminal or file has it, and by which rank

    @property
    def words(self) -> str:
        """The text, as an error has it."""
        return self.text.removeprefix("lockstep: ")

    def error(self) -> errors.LockstepError:
        """What is raised for it at the end of a step."""
        if self.kind == "model":
            return errors.ModelMismatch(self.words)
        return errors.ReplicaDrift(self.words, self.culprits) if self.kind == "replica" else self.comm_error()

    def comm_error(self) -> errors.CommError:
        """What an operation raises for it."""
        if self.kind == "waiting":
            words = f"timed out {self.words.replace(NO_FAULT, '')}\n  Work that long: init_process_group(timeout=...)"
            return errors.CollectiveTimeout(words, self.culprits)
        if self.kind in (*STANDSTILLS, "timeout"):
            return errors.CollectiveTimeout(self.words, self.culprits)
        if self.kind in ("raised", "finished", "gone"):
            return errors.PeerFailed(self.words, self.culprits[0] if self.culprits else None)
        return errors.CollectiveMismatch(self.words)

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Finding:
        """The opposite of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "culprits": tuple(fields["culprits"])})


def names(ranks: Iterable[int]) -> str:
    """rank 1; ranks 0,2-5"""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])]
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}{',' if len(run) == 2 else '-'}{run[-1]}" for run in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ",".join(spans)


def culprit(scene: Scene, ranks: Sequence[int]) -> str:
    """Culprit: rank 1 (host b, pid 4711)"""
    if len(ranks) != 1 or ranks[0] not in scene.sights:
        return f"Culprits: {names(ranks)}" if len(ranks) > 1 else f"Culprit: {names(ranks)}"
    status = scene.status(ranks[0])
    return f"Culprit: rank {status.rank} (host {status.host}, pid {status.pid})"


def operation(record: Record) -> str:
    """all_reduce float32 [4] sum #7 of group world, train.py:88 train_step"""
    if record.is_message:
        return f"{record.text}, {record.site}"
    return f"{record.text} #{record.seq} of group {record.group}, {record.site}"


def call(record: Record) -> str:
    """all_reduce float32 [4] sum at train.py:88 train_step"""
    if not record.text:
        return "a collective (its record cannot be read from here)"
    return f"{record.text} at {record.site}"


def step_after(done: int | str) -> str:
    """step 21: that which runs while 20 are done. For users the first step is step 1, as in a training log."""
    return f"step {int(done) + 1}"


def seconds(age_s: float) -> str:
    """12.4 s"""
    return f"{age_s:.1f} s"


def times(number: int) -> str:
    """1 collective; 2 collectives"""
    return f"{number} collective{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """1st, 2nd, 11th, 23rd"""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def waiters(waits: Sequence[Wait]) -> list[str]:
    """One line per operation that ranks wait in, the one with most ranks first.

    Of the collectives of a group that a rank has under way, the oldest: the others, queued for a GPU, come after it.
    """
    together: dict[str, list[Wait]] = {}
    oldest: dict[tuple[int, str], int] = {}
    for wait in waits:
        record = wait.record
        if not record.is_message and oldest.setdefault((wait.rank, record.group), record.seq) < record.seq:
            continue
        together.setdefault(operation(wait.record), []).append(wait)
    lines = []
    for text, same in sorted(together.items(), key=lambda item: (-len(item[1]), item[1][0].rank)):
        ranks = {wait.rank for wait in same}
        verb = "waits" if len(ranks) == 1 else "wait"
        longest_s = max(wait.age_s for wait in same)
        lines.append(f"{names(ranks)} {verb} in {text}" + f", for {seconds(longest_s)}" * (longest_s >= 0.1))
    return lines


def stacks(scene: Scene, ranks: Iterable[int]) -> list[str]:
    """One line per stack, innermost frame first, that of the fewest ranks first: who differs is the suspect.

    None of a rank that has gone on since.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(set(ranks) & set(scene.sights)):
        stack = scene.status(rank).stack
        if rank in scene.blocked and scene.blocked[rank].record.site in stack:  # what the operation does is no news
            stack = stack[: stack.index(scene.blocked[rank].record.site) + 1]
        if stack and scene.status(rank).stood_step is None:
            together.setdefault(stack, []).append(rank)
    ordered = sorted(together.items(), key=lambda item: (len(item[1]), item[1]))
    return [f"stack of {names(ranks)}: {' < '.join(reversed(stack))}" for stack, ranks in ordered]


def whereabouts(scene: Scene, how: Mapping[int, str]) -> list[str]:
    """Where ranks are, and what they did last; ranks at one place share a line. how: of each, "is not there"."""
    places = alike({rank: _place(scene, rank, text) for rank, text in how.items()})
    did = {last for _, last in places}
    is_shared = len(places) > 1 and len(did) == 1 and len(next(iter(did))) == 1
    lines = []
    for (text, last), ranks in places.items():
        verb, _, rest = text.partition(" ")
        unmoved_s = min(scene.status(rank).unmoved_s for rank in ranks) if ": at " in text else 0.0
        moved = f", unmoved for {seconds(unmoved_s)}" if unmoved_s >= 1 else ""
        lines.append(f"{names(ranks)} {_PLURALS.get(verb, verb) if len(ranks) > 1 else verb} {rest}{moved}")
        lines += () if is_shared else last
    return lines + ([f"each of them {did.pop()[0].lstrip()}"] if is_shared else [])


def _place(scene: Scene, rank: int, how: str) -> tuple[str, tuple[str, ...]]:
    """What is said of `rank` and where it is; what it did last, and has told of itself."""
    if rank not in scene.sights:
        return how, ()
    status = scene.status(rank)
    here = f": at {status.stack[-1]}" if status.stack else ""
    last, issued = "nothing yet" if status.last is None else operation(status.last), "issued last"
    if status.stood_step is not None:
        how, here = f"{how} in {step_after(status.stood_step)}", ""
        if status.last is not None and status.last.step < status.step - 1:  # what C++ starts is recorded a little later
            last, issued = f"{last}, in {step_after(status.last.step)}", "recorded last"
    return how + here, (f"  {issued}: {last}", *told_before(status))


def told_before(status: Status) -> list[str]:
    """What a rank has told of itself that may explain where it is, or how it ended."""
    texts = [*status.facts.get(BEFORE, {}).values(), *[f"it was handling {status.handling}"] * bool(status.handling)]
    return [f"  {text}" for text in texts]


def listed(what: Sequence[str]) -> str:
    """The first six."""
    return ", ".join(what[:6]) + (f" and {len(what) - 6} more" if len(what) > 6 else "")


def compose(
    scene: Scene,
    kind: Kind,
    key: str,
    head: str,
    culprits: Sequence[int],
    body: Sequence[str],
    *,
    why: str = "",
    fix: str = "",
    least: Sequence[str] = (),
    is_certain: bool = True,
    done: int | None = None,
) -> Finding:
    """The finding, in `LINES` of text. `least` are lines that are left out first where there are too many, and cut.

    is_certain: of a kind that may be.
    """
    who = f"  {culprit(scene, culprits)}" if culprits and kind not in _BLAMELESS else ""
    is_certain = is_certain and kind not in (*_MAY_PASS, *_NOTES)
    evidence = scene.limits.evidence if is_certain or kind in _MAY_PASS else ""
    middle = [line for text in body for line in _WRAPPER.wrap(text)]
    end = [f"Likely fix: {fix}"] * bool(fix) + [f"Evidence: {evidence}"] * bool(evidence)
    if why and len(middle) + len(least) + len(end) != LINES - 1:  # all there is finds room, but for this
        end.insert(0, f"Why it matters: {why}")
    room = LINES - 1 - len(end)
    middle += least
    if len(middle) > room:
        middle = [*middle[: room - 1], f"... and {len(middle) - room + 1} more"]
    text = "\n".join(_fit(line) for line in [f"lockstep: {head}{who}", *(f"  {line}" for line in middle), *end])
    return Finding(kind, tuple(culprits), text, is_certain, f"{kind}:{key}", done)


def _fit(line: str) -> str:
    line = " ".join(line.splitlines()) if "\n" in line else line
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."
