"""Batches of tokens for the training loop. What a step trains on is a function of its number, not of who asks.

The tokens are cut into windows. Epoch after epoch of shuffled windows makes one endless stream; a step takes the next
`batch` windows of it, also across the end of an epoch, so every window is used exactly once per epoch and every step is
full. A step is cut into equal microbatches, and each rank has the next few of them. So microbatch i of a step holds the
same windows for every number of ranks, and the position in the stream is one number that holds for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.coverage import Coverage, Verdict, tally_of
from lockstep.data.cursor import STATE_VERSION, check_state
from lockstep.data.order import Order, Positions, epoch_order
from lockstep.data.sample_log import Span, sample_record, stream_spans
from lockstep.data.sampler import DistributedSampler
from lockstep.data.token_file import Tokens
from lockstep.errors import ConfigError, DataError


class TokenBatch(NamedTuple):
    """Windows side by side. Shapes: both [B, T], int64; `targets[b, t]` is the token after `inputs[b, t]`."""

    inputs: Tensor
    targets: Tensor


@final
class TokenWindows(Dataset[TokenBatch]):
    """Tokens as a dataset of windows: number i predicts the tokens [i * T + 1, (i + 1) * T + 1), so each token once.

    Up to T - 1 tokens at the end, too few for a window, are left out.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        if context < 1:
            raise ConfigError(f"context={context}: a window has at least one token")
        if len(tokens) <= context:
            raise DataError(
                f"{len(tokens)} tokens are too few: one window of context {context} needs {context + 1}. "
                "Use more text or a shorter context"
            )
        self.tokens = tokens
        self.context = context
        self._offsets = np.arange(context + 1)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> TokenBatch:
        """Shapes: [T], [T]."""
        inputs, targets = self.batch([range(len(self))[index]])
        return TokenBatch(inputs[0], targets[0])

    def batch(self, indices: Sequence[int] | Positions) -> TokenBatch:
        """The windows `indices`. Shapes: [B, T], [B, T]."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.context
        block = torch.from_numpy(self.tokens[starts + self._offsets].astype(np.int64, subok=False))
        return TokenBatch(block[:, :-1].contiguous(), block[:, 1:].contiguous())


@final
class TokenLoader:
    """An endless iterator: each item is one step, the list of this rank's microbatches.

        for microbatches in loader:
            for inputs, targets in microbatches: ...

    batch: windows per step over all ranks; fixed, whatever the number of ranks.
    microbatch: windows in one forward; None takes a rank's whole share. Every microbatch has the same number of tokens,
        so a plain mean over microbatches and ranks is the mean over the step's tokens.
    digest: of the tokens, so that a resume on other text is refused.

    A loop that asks for `step_at(loader.consumed)` itself calls `advance()` after each step; iterating does it when the
    step is handed out. `coverage` counts the windows: every rank calls `coverage.combine(comm)` before `state_dict()`.

    Raises: ConfigError where `batch` cannot be cut evenly.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        context: int,
        batch: int,
        microbatch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        order: Order = "torch",
        digest: str = "",
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} with world_size={world_size}: ranks are 0 to world_size - 1")
        self.windows = TokenWindows(tokens, context)
        self.batch = batch
        self.microbatch = _microbatch(batch, microbatch, world_size)
        self.accumulation = batch // world_size // self.microbatch  # microbatches per rank and step
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.order: Order = order
        self.digest = digest
        self.consumed: int = 0  # windows of the stream trained on or handed out, over all ranks
        self.coverage = Coverage(len(self.windows), world_size)
        # That of one epoch is kept, because "torch" has to shuffle all of it.
        self._order_of = lru_cache(maxsize=1)(partial(epoch_order, len(self.windows), order, seed))

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        while True:
            microbatches = self.step_at(self.consumed)
            self.advance()
            yield microbatches

    def advance(self) -> None:
        """The step at `consumed` has been trained on: count this rank's windows and go on to the next step."""
        share = self.batch // self.world_size
        first = self.consumed + self.rank * share
        for span in stream_spans(first, first + share, len(self.windows)):
            self.coverage.add(self._samples(span), span.epoch)
        self.consumed += self.batch

    def step_at(self, consumed: int) -> list[TokenBatch]:
        """This rank's microbatches of the step that begins after `consumed` windows of the stream."""
        own = range(self.rank * self.accumulation, (self.rank + 1) * self.accumulation)
        return [self.windows.batch(self.samples_at(consumed, index)) for index in own]

    def samples_at(self, consumed: int, index: int) -> Positions:
        """The windows in microbatch `index`, counted over all ranks, of that step. Shapes: [microbatch]."""
        first = consumed + index * self.microbatch
        spans = stream_spans(first, first + self.microbatch, len(self.windows))
        return np.concatenate([self._samples(span) for span in spans])

    def samples_of_step(self, consumed: int) -> dict[str, Any]:
        """For the log: which windows, over all ranks, the step that begins after `consumed` windows trains on.

        JSON values, from which `sample_ids` makes the list.
        """
        spans = stream_spans(consumed, consumed + self.batch, len(self.windows))
        return sample_record(spans, len(self.windows), self.order, self.seed)

    def _samples(self, span: Span) -> Positions:
        return self._order_of(span.epoch)(np.arange(span.first, span.stop))

    def verdicts(self) -> list[Verdict]:
        """What the coverage proves: of each finished epoch, and of the beginning of the one that is going on.

        After `coverage.combine(comm)`. The windows of the epoch so far are hashed again: for the end of a run.
        """
        epoch, position = divmod(self.consumed, len(self.windows))
        verdicts = [self.coverage.verdict(finished) for finished in range(epoch)]
        if position:
            expected = tally_of(self._samples(Span(epoch, 0, position)))
            verdicts.append(self.coverage.verdict(epoch, expected))
        return verdicts

    @property
    def epoch(self) -> float:
        """Times the whole text has been handed out."""
        return self.consumed / len(self.windows)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, in JSON values; the same on every rank. Every step handed out counts as done."""
        coverage = self.coverage.state_dict(self.consumed // len(self.windows))
        return {"version": STATE_VERSION, "consumed": self.consumed, "coverage": coverage, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with another number of ranks, batch or microbatch.

        Raises: DataError naming both values where the tokens, context, seed or order are others.
        """
        check_state("loader", state, self._identity(), counts=("consumed",), parts=("coverage",))
        self.coverage.load_state_dict(state["coverage"])
        self.consumed = state["consumed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "windows": len(self.windows),
            "context": self.windows.context,
            "seed": self.seed,
            "order": self.order,
            "digest": self.digest,
        }


def validation_batches(
    tokens: Tokens, *, context: int, microbatch: int, rank: int = 0, world_size: int = 1
) -> Iterator[TokenBatch]:
    """This rank's part of all windows in `tokens`, each window on exactly one rank, in order.

    Ranks may differ by a window, and by a batch; some may get nothing. So sum losses and tokens over ranks and divide.
    """
    if microbatch < 1:
        raise ConfigError(f"microbatch={microbatch}: a batch has at least one window")
    windows = TokenWindows(tokens, context)
    samples = list(DistributedSampler(windows, world_size, rank, shuffle=False, pad="none"))
    for first in range(0, len(samples), microbatch):
        yield windows.batch(samples[first : first + microbatch])


def _microbatch(batch: int, microbatch: int | None, world_size: int) -> int:
    share, rest = divmod(batch, world_size)
    if rest or share < 1:
        raise ConfigError(
            f"batch={batch} windows cannot be divided evenly among {world_size} ranks: "
            f"try {max(1, round(batch / world_size)) * world_size}"
        )
    size = share if microbatch is None else microbatch
    if size < 1 or share % size:
        raise ConfigError(
            f"microbatch={size} does not divide a rank's share of the batch: {batch} / {world_size} = {share} windows"
        )
    return size
