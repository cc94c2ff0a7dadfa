"""Ranks as threads of one process: for tests, and to look at what ranks do without starting any.

The rank that comes last to an operation moves the data of all of them, under the one lock of the world; a wait returns
after that. So no rank's buffer is touched before all have come, or after any of them went on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lockstep.comm.local_exchange import copy_message, exchange, find_mismatch
from lockstep.comm.op import AllWork, CommOp, DoneWork, Work, describe
from lockstep.comm.shm.announcement import agree_on_tensor
from lockstep.comm.transport import Transport, blamed_on, without_traceback
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost, TransportClosed


@final
class LocalWorld:
    """The shared memory of `world_size` ranks; `transports[rank]` is what the thread of that rank uses."""

    def __init__(self, world_size: int, timeout_s: float = 30.0) -> None:
        self.changed = threading.Condition()  # the world's one lock; notified when an operation ends or a rank leaves
        self.left: dict[int, str] = {}  # global rank -> how it ended
        self.doing: dict[int, str] = {}  # global rank -> what it waits in
        group = _Group(self, tuple(range(world_size)), timeout_s)
        self.transports = tuple(LocalTransport(group, rank) for rank in range(world_size))

    def rank_left(self, rank: int, error: BaseException | None = None) -> None:
        """Say that `rank` will not come any more: whoever waits for it raises PeerLost now, not after the timeout."""
        with self.changed:
            self.left.setdefault(rank, "has returned" if error is None else f"raised {type(error).__name__}: {error}")
            self.changed.notify_all()


@dataclass(slots=True, eq=False)
class _Entry:
    """What has become of one collective of all ranks, or of one rank's message."""

    ops: dict[int, CommOp] = field(default_factory=dict)  # rank -> what it asked for; empty again when it is done
    came: set[int] = field(default_factory=set)
    done: bool = False
    error: CommError | None = None
    source: int | None = None  # of a message: the rank that sent it

    def finish(self, error: CommError | None = None) -> None:
        self.done = True
        self.error = error
        self.ops = {}


class _Group:
    """What the ranks of one communicator share; everything here changes under the lock of the world only."""

    def __init__(self, world: LocalWorld, global_ranks: tuple[int, ...], timeout_s: float) -> None:
        self.world = world
        self.global_ranks = global_ranks
        self.ranks = range(len(global_ranks))
        self.timeout_s = timeout_s
        self.closed: set[int] = set()
        self.aborted: dict[int, CommError] = {}  # rank -> what it was aborted with
        self.collectives: dict[int, _Entry] = {}  # number -> what some ranks have called and others not yet
        self.messages: list[tuple[int, CommOp, _Entry]] = []  # sends and receives without a partner yet, oldest first
        self.children: dict[tuple[int, int], _Group] = {}  # (number of the split, index of the group)
        self.shared: dict[int, tuple[Tensor, set[int]]] = {}  # number -> a tensor of all ranks, and who lacks it

    def gone(self, rank: int) -> str | None:
        """How this rank ended or left; None while it is here."""
        away = "has closed this communicator" if rank in self.closed else None
        away = "has aborted this communicator" if rank in self.aborted else away
        return self.world.left.get(self.global_ranks[rank], away)

    def abort(self, rank: int, error: CommError) -> None:
        """End what `rank` is in, for all, and let it begin nothing more, here and in the parts of this group."""
        if rank in self.closed or rank in self.aborted:
            return
        self.aborted[rank] = error
        lost = PeerLost(f"rank {rank} has aborted this communicator, and will not come", rank)
        for entry in tuple(self.collectives.values()):
            if rank in entry.came and not entry.done:
                entry.finish(lost)
        for source, _, entry in self.messages:
            if source == rank:
                entry.finish(lost)
        self.messages = [message for message in self.messages if message[0] != rank]
        place = self.global_ranks[rank]
        for child in self.children.values():
            if place in child.global_ranks:
                child.abort(child.global_ranks.index(place), error)

    def state(self, rank: int) -> str:
        """What this rank is at, for a message."""
        doing = self.world.doing.get(self.global_ranks[rank])
        return f"rank {rank} {self.gone(rank) or ('waits in ' + doing if doing else 'waits in nothing')}"

    def come(self, rank: int, number: int, op: CommOp) -> _Entry:
        """Rank `rank` calls its collective `number`; the last rank to come carries it out."""
        entry = self.collectives.setdefault(number, _Entry())
        entry.came.add(rank)
        if len(entry.came) == len(self.ranks):
            del self.collectives[number]
        if entry.done:  # it has failed without this rank
            return entry
        entry.ops[rank] = op
        mismatch = find_mismatch(entry.ops)
        if mismatch is not None:
            entry.finish(mismatch)
        elif len(entry.ops) == len(self.ranks):
            _carry_out(entry, lambda: exchange([entry.ops[rank] for rank in self.ranks]), op)
        return entry

    def post(self, rank: int, op: CommOp) -> _Entry:
        """Rank `rank` sends or receives; whoever comes second copies the message."""
        entry = _Entry()
        for index, (other, other_op, other_entry) in enumerate(self.messages):
            send, source, recv, target = (
                (op, rank, other_op, other) if op.kind == "send" else (other_op, other, op, rank)
            )
            if (send.kind, recv.kind, send.peer, send.tag) != ("send", "recv", target, recv.tag):
                continue
            if recv.peer in (None, source):
                del self.messages[index]
                _carry_out(entry, lambda a=send, b=source, c=recv, d=target: copy_message(a, b, c, d), op)
                entry.source = other_entry.source = source
                other_entry.finish(entry.error)
                return entry
        self.messages.append((rank, op, entry))
        return entry


def _carry_out(entry: _Entry, move: Callable[[], None], op: CommOp) -> None:
    try:
        move()
    except CollectiveMismatch as error:
        entry.finish(error)
    except RuntimeError as error:  # every rank must hear of it, not only the one that came last
        entry.finish(CommError(f"{describe(op)}: {error}"))
    else:
        entry.finish()


@final
class LocalTransport(Transport):
    """One rank of a `LocalWorld`. A send ends when its receive has come, as on a network without buffers."""

    def __init__(self, group: _Group, rank: int) -> None:
        self.name = "threads"
        self.rank = rank
        self.world_size = len(group.global_ranks)
        self.global_ranks = group.global_ranks
        self.device = torch.device("cpu")
        self.timeout_s = group.timeout_s
        self._group = group
        self._collectives = self._splits = self._shared = 0

    def submit(self, op: CommOp) -> Work:
        if op.algorithm is not None:
            return op.algorithm.start(op)
        if op.kind == "batch_send_recv":
            return AllWork([self.submit(part) for part in op.parts])
        group = self._group
        with group.world.changed:
            if self.rank in group.closed:
                raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
            if self.rank in group.aborted:
                own = CommError(f"{describe(op)}: aborted on rank {self.rank}")
                return DoneWork(blamed_on(group.aborted[self.rank], own))
            if op.kind in ("send", "recv"):
                entry = group.post(self.rank, op)
            else:
                entry = group.come(self.rank, self._collectives, op)
                self._collectives += 1
            if entry.done:
                group.world.changed.notify_all()
        return _LocalWork(group, self.rank, op, entry)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        number = self._splits
        self._splits += 1
        for index, ranks in enumerate(groups):
            if self.rank in ranks:
                members = tuple(self.global_ranks[rank] for rank in ranks)
                with self._group.world.changed:
                    if self.rank in self._group.aborted:
                        own = CommError(f"split {number}: aborted on rank {self.rank}")
                        raise blamed_on(self._group.aborted[self.rank], own)
                    fresh = _Group(self._group.world, members, self.timeout_s)
                    child = self._group.children.setdefault((number, index), fresh)
                if child.global_ranks != members:
                    raise CollectiveMismatch(
                        f"split {number} on rank {self.rank}: this rank makes a group of {members}, another one of "
                        f"{child.global_ranks}; every rank must pass the same groups"
                    )
                return LocalTransport(child, list(ranks).index(self.rank))
        return None

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        number = self._shared
        self._shared += 1
        waiting = self._group.shared
        if self.rank == 0:
            with self._group.world.changed, torch.inference_mode(False):  # for use in every mode
                waiting[number] = (torch.zeros(numel, dtype=dtype, device="cpu"), set(range(self.world_size)))
        try:
            agree_on_tensor(self, numel, dtype, 0)
        except CommError:
            with self._group.world.changed:
                waiting.pop(number, None)
            raise
        with self._group.world.changed, torch.inference_mode(False):
            whole, missing = waiting[number]
            missing.remove(self.rank)
            if not missing:
                del waiting[number]
            return whole.data  # with a count of changes of its own, as on processes: autograd looks at that

    def abort(self, error: CommError) -> None:
        with self._group.world.changed:
            self._group.abort(self.rank, error)
            self._group.world.changed.notify_all()

    def close(self) -> None:
        with self._group.world.changed:
            self._group.closed.add(self.rank)
            self._group.world.changed.notify_all()


class _LocalWork(Work):
    def __init__(self, group: _Group, rank: int, op: CommOp, entry: _Entry) -> None:
        self._group = group
        self._rank = rank
        self._op = op
        self._entry = entry
        self._error: CommError | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        entry, world = self._entry, self._group.world
        if not entry.done:
            limit_s = self._group.timeout_s if timeout_s is None else timeout_s
            place = self._group.global_ranks[self._rank]
            with world.changed:
                world.doing[place] = describe(self._op)
                try:
                    world.changed.wait_for(self._ended, limit_s)
                finally:
                    world.doing.pop(place, None)
                if not entry.done:
                    self._give_up(self._timeout(limit_s))
        if entry.error is not None:
            if self._error is None:
                own = without_traceback(entry.error)  # each rank raises its own
                self._error = blamed_on(self._group.aborted.get(self._rank), own)
            raise self._error

    def is_done(self) -> bool:
        with self._group.world.changed:
            return self._ended()

    def source_rank(self) -> int | None:
        return self._entry.source if self._op.kind == "recv" and self._op.peer is None else None

    def _ended(self) -> bool:
        """Whether the wait is over, because of a lost rank at the latest. Under the lock."""
        if not self._entry.done:
            lost = [rank for rank in self._missing() if self._group.gone(rank) is not None]
            needs_all_gone = self._op.kind == "recv" and self._op.peer is None
            if lost and (not needs_all_gone or len(lost) == len(self._group.ranks) - 1):
                who = f"rank {lost[0]} {self._group.gone(lost[0])}"
                self._give_up(PeerLost(f"{describe(self._op)}: {who}, and will not come", lost[0]))
        return self._entry.done

    def _missing(self) -> list[int]:
        """The ranks whose coming would let this operation go on."""
        if self._op.kind in ("send", "recv") and self._op.peer is not None:
            return [self._op.peer]
        came = self._entry.came or {self._rank}
        return [rank for rank in self._group.ranks if rank not in came]

    def _timeout(self, limit_s: float) -> CollectiveTimeout:
        missing = self._missing()
        late = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
        others = "; ".join(self._group.state(rank) for rank in self._group.ranks if rank != self._rank)
        return CollectiveTimeout(
            f"{describe(self._op)}: {late} did not come within {limit_s:g} s ({others}). "
            f"Next: find why that rank skipped this call or waits elsewhere; raise timeout_s if it is only slow",
            missing,
        )

    def _give_up(self, error: CommError) -> None:
        """End the operation for every rank that is or will be in it; no buffer is touched any more."""
        self._entry.finish(error)
        self._group.messages = [message for message in self._group.messages if message[2] is not self._entry]
        self._group.world.changed.notify_all()
