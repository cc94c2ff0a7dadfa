"""Which samples went into a step, as a few numbers in a line of the run's log.

A step takes neighbouring positions of an epoch's order, of one epoch or of several. With the seed and the kind of order
these give the samples, over all ranks, in the order in which they are dealt. So a log needs no lists of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from lockstep.data.order import Order, epoch_order
from lockstep.errors import DataError


class Span(NamedTuple):
    """Positions [first, stop) of an epoch's order; those past its end are the first ones again."""

    epoch: int
    first: int
    stop: int


def stream_spans(first: int, stop: int, length: int) -> list[Span]:
    """[first, stop) of the stream of epochs end to end, of `length` samples each, as positions within epochs."""
    epochs = range(first // length, -(-stop // length))
    return [Span(e, max(first - e * length, 0), min(stop - e * length, length)) for e in epochs]


def sample_record(spans: Sequence[Span], length: int, order: Order | None, seed: int) -> dict[str, Any]:
    """The part of a log line, in JSON values, that says which samples were used."""
    return {"samples": [list(span) for span in spans], "length": length, "order": order, "seed": seed}


def sample_ids(record: Mapping[str, Any]) -> list[int]:
    """The samples of the step that a log line is about, over all ranks, in the order in which they were dealt.

    Microbatch i of n equal ones is the i-th n-th part of the list; rank r of a `DistributedSampler` with W ranks has
    every W-th sample, from the r-th on.

    Raises: DataError where the line does not say it.
    """
    return [sample for _, samples in samples_by_epoch(record) for sample in samples]


def samples_by_epoch(record: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
    """(epoch, samples) for each epoch that the step takes samples of. Raises: DataError as `sample_ids`."""
    try:
        length, order, seed = int(record["length"]), record["order"], int(record["seed"])
        spans = [Span(*map(int, span)) for span in record["samples"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"this line does not say which samples its step used: {error!r}") from error
    if order is not None and order not in get_args(Order):
        raise DataError(f"order={order!r} is none of {', '.join(get_args(Order))}")
    return [
        (span.epoch, epoch_order(length, order, seed, span.epoch)(np.arange(span.first, span.stop) % length).tolist())
        for span in spans
    ]
