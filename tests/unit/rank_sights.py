"""Ranks that exist only on paper: what each has issued and where it is, as `diagnose` is given it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from lockstep.observe.diagnosis import diagnose
from lockstep.observe.flight import Mark, Record
from lockstep.observe.scene import Limits, Message, message_text, read_message
from lockstep.observe.status import FINISHED, RAISED, Folding, LastWords, Sight, Status, Waiting
from lockstep.observe.wording import Finding

REDUCE = "all_reduce float32 [4] sum"
SITE = "train.py:41 train_step"
FIRST, SECOND = "train.py:40 train_step", "train.py:41 train_step"
Build = Callable[[], list["PaperRank"]]
LIMITS = Limits(evidence=".lockstep/r7")


class PaperRank:
    """One of them. Its newest operation is `age_s` old."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.step, self.host = 0, "b"
        self.machine = 0  # the first rank there; 0: as its host's name tells
        self.records: list[Record] = []
        self.status_fields: dict[str, object] = {}
        self.folds: dict[str, Folding] = {}
        self.digests: dict[str, int] = {}
        self.messages: Counter[tuple[str, Message]] = Counter()
        self.age_s = 0.0
        self.is_gone = False
        self.how = ""
        self.is_stopped = self.is_working = self.is_seen = False
        self.open: set[int] = set()
        self.is_readable = True
        self.kept = 1024

    def group(self, name: str, ranks: Sequence[int]) -> None:
        self.folds.setdefault(name, Folding(ranks))

    def call(self, text: str = REDUCE, site: str = SITE, group: str = "world", label: str = "") -> int:
        self.group(group, range(self.world_size))
        fold = self.folds[group]
        word = f"{self.digests.get(group, 0)} {text} {self.step}"
        digest = self.digests[group] = zlib.crc32(word.encode()) + 1
        number = len(self.records)
        began_ns = 1000 * number
        self.records.append(
            Record(number, fold.count, self.step, began_ns, began_ns + 5, digest, False, group, text, site, label)
        )
        fold.add(Mark(fold.count, self.step, digest))
        return number

    def calls(self, *sites: str, text: str = REDUCE) -> None:
        """One operation per site, and the step is done."""
        for site in sites:
            self.call(text, site)
        self.step += 1

    def message(self, text: str, site: str = SITE, group: str = "world") -> int:
        self.group(group, range(self.world_size))
        number, said = len(self.records), read_message(text)
        assert said is not None
        seq = self.messages[group, said]
        self.messages[group, said] += 1
        began_ns = 1000 * number
        self.records.append(Record(number, seq, self.step, began_ns, began_ns + 5, 0, True, group, text, site, ""))
        return number

    def waits(self, number: int, age_s: float = 12.4, unmoved_s: float | None = None) -> None:
        """It stands in operation `number`."""
        self.open.add(number)
        self.is_at(self.records[number].site, unmoved_s=age_s if unmoved_s is None else unmoved_s)
        self.open_s = age_s

    def is_at(self, *stack: str, unmoved_s: float = 0.0, activity: str = "") -> None:
        self.status_fields.update(stack=("train.py:9 main", *stack), unmoved_s=unmoved_s, activity=activity)

    def finishes(self) -> None:
        self.status_fields.update(state=FINISHED, words=LastWords("", "", ""))

    def raises(self, kind: str, message: str, where: str, is_consequence: bool = False, of: int | None = None) -> None:
        self.status_fields.update(state=RAISED, words=LastWords(kind, message, where, is_consequence, of))

    def kept_records(self) -> list[Record]:
        if not self.is_readable:
            return []
        return [r._replace(left_ns=0) if r.number in self.open else r for r in self.records[-self.kept :]]

    def sight(self) -> Sight:
        records = self.kept_records() if self.is_readable else self.records
        fields: dict[str, object] = {
            "step": self.step,
            "machine": self.machine or zlib.crc32(self.host.encode()),
            "groups": {name: fold.progress() for name, fold in self.folds.items()},
            "waiting": tuple(Waiting(r, self.open_s) for r in records if r.number in self.open),
            "last": records[-1] if records else None,
            **self.status_fields,
        }
        status = Status(self.rank, self.world_size, 4710 + self.rank, self.host, **fields)  # type: ignore[arg-type]
        kernel = (self.is_stopped, self.is_working, self.is_seen)
        return Sight(Status.from_json(status.to_json()), self.age_s, self.is_gone, self.how, *kernel)


def world(size: int) -> list[PaperRank]:
    return [PaperRank(rank, size) for rank in range(size)]


def running(size: int, steps: int = 3) -> list[PaperRank]:
    """Ranks that have done some whole steps of two collectives each."""
    ranks = world(size)
    for _ in range(steps):
        for one in ranks:
            one.calls(FIRST, SECOND)
    return ranks


def receivers(size: int) -> list[PaperRank]:
    """Each waits for a message of the next one."""
    ranks = world(size)
    for one in ranks:
        one.waits(one.message(message_text("recv", "float32 [4]", (one.rank + 1) % size, 0)), 2.6)
    return ranks


def waiting_for_rank_1(size: int = 3, age_s: float = 12.4) -> list[PaperRank]:
    ranks = running(size)
    for one in ranks:
        if one.rank != 1:
            one.waits(one.call(REDUCE, FIRST), age_s)
        else:
            one.is_at("train.py:31 train_step", "data.py:31 load_batch", unmoved_s=age_s)
    return ranks


def rank_1(change: Callable[[PaperRank], object], age_s: float = 1.5, size: int = 3) -> list[PaperRank]:
    ranks = waiting_for_rank_1(size, age_s)
    change(ranks[1])
    return ranks


def diagnosed(ranks: Sequence[PaperRank], limits: Limits = LIMITS) -> Finding | None:
    """What `diagnose` makes of them. Whoever looks finds the same, or the test fails here."""
    by_rank = {one.rank: one for one in ranks}
    sights = {one.rank: one.sight() for one in ranks}
    able = [one.rank for one in ranks if one.age_s < 1 and not one.is_gone]
    found = [diagnose(me, sights, lambda rank: by_rank[rank].kept_records(), limits) for me in able]
    assert len({None if one is None else (one.key, one.culprits, one.is_certain) for one in found}) == 1
    if found[0] is not None:
        lines = found[0].text.splitlines()
        assert len(lines) <= 12, found[0].text
        assert all(len(line) <= 110 for line in lines), found[0].text
        assert not any(line.startswith("Likely fix") and line.endswith("...") for line in lines), found[0].text
    return found[0]


def found_in(ranks: Sequence[PaperRank], limits: Limits = LIMITS) -> Finding:
    """There is one."""
    finding = diagnosed(ranks, limits)
    assert finding is not None
    return finding
