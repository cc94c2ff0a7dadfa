"""What the leaders of the hosts send each other: messages of bytes that begin with a word about how things stand.

While all is well the word says which operation this is, and every leader compares. A leader whose host has failed still
sends its message, with the failure in its word; so the other hosts learn at once what happened and to which rank, and
none waits for its limit.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.handshake import listed
from lockstep.comm.op import ONE_ORDER, CommOp, Work, signature
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

WORD_BYTES = 1024
_CALLED_BYTES = 128  # of what an operation is, in a word without a failure
_TEXT_MAX = 700  # of a failure in its word; the rest of its JSON fits beside it
_MISSING_MAX = 16
_ALIGNMENT = 64

Buffer = Callable[[str, int], Tensor]  # (what for, bytes) -> [bytes] of memory that is kept for the next time


class Fault(NamedTuple):
    """A failure as it travels between ranks; all ranks in it are those of the whole group."""

    kind: str  # an error class of ours
    text: str
    rank: int | None = None  # of a PeerLost
    missing: tuple[int, ...] = ()  # of a CollectiveTimeout
    speaker: int = -1  # the rank that saw it

    @classmethod
    def of(cls, error: RuntimeError, speaker: int, part: str, speaks_for: Sequence[Sequence[int]]) -> Fault:
        """What `error` of a part of the group means in the whole: its rank i is the first of `speaks_for[i]`."""
        ranks = [members[0] for members in speaks_for]
        rank, missing, who = None, (), ""
        if isinstance(error, PeerLost):
            rank = None if error.rank is None else ranks[error.rank]
            who = "a rank is lost" if rank is None else f"rank {rank} is lost"
            if error.rank is not None and len(speaks_for[error.rank]) > 1:
                who += f", or one of those it speaks for on its host ({listed(speaks_for[error.rank][1:])})"
        elif isinstance(error, CollectiveTimeout):
            missing = tuple(ranks[late] for late in error.missing)
            who = f"rank{'s' * (len(missing) > 1)} {listed(missing)} did not come" if missing else "not every rank came"
        where = f"{part} (ranks {listed(ranks)}, counted from 0 there)"
        text = f"{who}. In {where}: {error}" if who else f"in {where}: {error}"
        return cls(type(error).__name__, text, rank, missing, speaker)

    @classmethod
    def again(cls, error: CommError, speaker: int, place: str) -> Fault:
        """An error that was raised at `place`, to be told to others."""
        rank = error.rank if isinstance(error, PeerLost) else None
        missing = error.missing if isinstance(error, CollectiveTimeout) else ()
        return cls(type(error).__name__, str(error).removeprefix(f"{place}: "), rank, missing, speaker)

    def error(self, place: str, rank: int) -> CommError:
        """The error to raise on rank `rank`, at `place`."""
        told = "" if self.speaker == rank else f"rank {self.speaker} reports: "
        message = f"{place}: {told}{self.text}"
        if self.kind == "PeerLost":
            return PeerLost(message, self.rank)
        if self.kind == "CollectiveTimeout":
            return CollectiveTimeout(message, self.missing)
        return (CollectiveMismatch if self.kind == "CollectiveMismatch" else CommError)(message)


def write_word(word: Tensor, fault: Fault | None, op: CommOp) -> None:
    """Fill `word` [WORD_BYTES]: a zero and what `op` is, or a failure."""
    if fault is None:
        content = b"\0" + _called(op).encode().ljust(_CALLED_BYTES - 1)
    else:
        text = re.sub(r'[^ -~]|["\\]', " ", fault.text)[:_TEXT_MAX]  # one byte each in JSON
        short = fault._replace(text=text, missing=fault.missing[:_MISSING_MAX])
        content = json.dumps(short).encode().ljust(WORD_BYTES)
    word[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def read_word(word: Tensor) -> Fault | None:
    """The failure that `write_word` wrote, in any process."""
    if not word[0]:
        return None
    kind, text, rank, missing, speaker = json.loads(bytes(word.tolist()))
    return Fault(kind, text, rank, tuple(missing), speaker)


def _called(op: CommOp) -> str:
    """What must be equal on every rank; of shapes the number of elements."""
    inputs, outputs = (tuple(tensor.view(-1) for tensor in tensors[:1]) for tensors in (op.inputs, op.outputs))
    return signature(op._replace(inputs=inputs, outputs=outputs))[: _CALLED_BYTES - 1]


@final
class Letters:
    """One message from each leader to each other one: fill `outgoing`, `send`, `wait`, read `incoming`.

    Messages of one `slot` share their memory, so no two are under way at once.
    """

    _work: Work

    def __init__(
        self,
        leaders: Transport,
        exchange: CommOp,
        sent: Sequence[Tensor],
        got: Mapping[int, Tensor],
        end: int | None = None,
    ) -> None:
        """exchange: what moves the messages, whose inputs this leader writes. sent: the one to each host. got: those
        that come, by host. end: where a message ends that has room for more.
        """
        self._leaders = leaders
        self._exchange = exchange
        self._sent = sent
        self._got = got
        self._end = end
        self._fault: Fault | None = None

    @classmethod
    def shared(cls, leaders: Transport, buffer: Buffer, slot: int, nbytes: int) -> Letters:
        """Every leader gives all the same, up to `nbytes`."""
        hosts, end = leaders.world_size, WORD_BYTES + nbytes
        box = buffer(f"in {slot}", hosts * _aligned(end))
        rows = box.view(hosts, -1).unbind()
        mine = rows[leaders.rank]
        return cls(leaders, CommOp(-1, "all_gather", (mine,), (box,)), [mine] * hosts, dict(enumerate(rows)), end)

    @classmethod
    def spread(cls, leaders: Transport, buffer: Buffer, slot: int, nbytes: int, source: int) -> Letters:
        """The leader of host `source` gives all the same `nbytes`; the others listen."""
        box = buffer(f"in {slot}", WORD_BYTES + nbytes)
        given = (box,) if leaders.rank == source else ()
        return cls(leaders, CommOp(-1, "broadcast", given, (box,), source), [box] * leaders.world_size, {source: box})

    @classmethod
    def addressed(
        cls, leaders: Transport, buffer: Buffer, slot: int, sent: Sequence[int], got: Sequence[int]
    ) -> Letters:
        """Every leader has something else for each other one: `sent[host]` bytes go there, `got[host]` come back."""

        def messages(name: str, sizes: Sequence[int]) -> tuple[Tensor, ...]:
            """One for each host, none for the leader's own."""
            lengths = [0 if host == leaders.rank else WORD_BYTES + size for host, size in enumerate(sizes)]
            *starts, total = itertools.accumulate(map(_aligned, lengths), initial=0)
            room = buffer(f"{name} {slot}", total)
            return tuple(room[start : start + length] for start, length in zip(starts, lengths, strict=True))

        out, into = messages("out", sent), messages("in", got)
        coming = {host: message for host, message in enumerate(into) if message.numel()}
        return cls(leaders, CommOp(-1, "all_to_all", out, into), out, coming)

    def outgoing(self, host: int) -> Tensor:
        """The bytes for `host`, to be filled."""
        return self._sent[host][WORD_BYTES : self._end]

    def incoming(self, host: int) -> Tensor:
        """The bytes that came from `host`."""
        return self._got[host][WORD_BYTES : self._end]

    def send(self, fault: Fault | None, op: CommOp) -> None:
        """Start the exchange, with `fault` in its word. `op` is what it is for."""
        self._fault = fault
        for message in self._exchange.inputs:
            if message.numel():
                write_word(message[:WORD_BYTES], fault, op)
        self._work = self._leaders.submit(self._exchange._replace(seq=op.seq, label=op.label))

    def wait(self, limit_s: float, op: CommOp) -> Fault | None:
        """The first failure that a host reports, in the order of hosts; this one's own, where it sends itself no word.

        Raises: CommError where the exchange failed; CollectiveMismatch where a host is in another operation than `op`.
        """
        self._work.wait(limit_s)
        own = None if self._leaders.rank in self._got else self._fault
        words = {host: message[:WORD_BYTES] for host, message in self._got.items()}
        for word in words.values():
            fault = read_word(word)
            if fault is not None:
                return own or fault
        ours = _called(op)
        for host, word in words.items():
            theirs = bytes(word[1:_CALLED_BYTES].tolist()).decode().rstrip()
            if theirs != ours:
                lines = f"rank {self._leaders.rank}: {ours}; rank {host}: {theirs}"
                raise CollectiveMismatch(f"ranks called different operations at the same point: {lines}. {ONE_ORDER}")
        return own


def _aligned(nbytes: int) -> int:
    """So many bytes that what follows is aligned for every dtype."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
