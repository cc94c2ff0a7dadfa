"""What users hold: the operations of one group of ranks, checked at the door and handed on as `CommOp`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.comm import objects
from lockstep.comm.algorithms.choice import by_messages
from lockstep.comm.op import CommOp, Kind, Reduction, ThenWork, Work
from lockstep.comm.operands import (
    SUM_LIKE,
    check_even,
    check_list,
    check_reduction,
    check_root_list,
    dense,
    in_place,
    in_place_list,
    peer_of,
)
from lockstep.comm.rank_group import RankGroup
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.comm.mesh import Mesh


class Communicator(RankGroup):
    """The ranks of one group, and everything they can say to each other.

    Every operation takes tensors of any shape, also non-contiguous and empty ones. By default it blocks until the
    result may be read; with `async_op=True` it returns at once and `Work.wait()` is the moment. Both return a `Work`.
    A collective is the transport's own, or made of messages where `algorithm=` names one of `algorithms.choice`; that
    is the same on all ranks, and blocks.

    Collective: every rank of the group calls the same operations in the same order (messages are between two ranks).
    Raises: ConfigError before anything is sent, for arguments that cannot be right; CommError from the waiting.
    """

    _collectives = 0  # so many were begun

    # ------------------------------------------------------------------ one to all, all to one

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, algorithm: str | None = None, async_op: bool = False, label: str = ""
    ) -> Work:
        """Every rank's `tensor` becomes rank `src`'s. Same shape and dtype everywhere."""
        src = peer_of(self, "src", src)
        flat, copy_back = in_place(tensor)
        inputs = (flat,) if self.rank == src else ()
        return self._collective("broadcast", inputs, (flat,), copy_back, async_op, label, algorithm, peer=src)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        reduce: Reduction = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Rank `dst`'s `tensor` becomes the reduction over all ranks; on the others it keeps its value."""
        dst = peer_of(self, "dst", dst)
        check_reduction(reduce, tensor)
        if self.rank == dst:
            flat, copy_back = in_place(tensor, complex_as_real=reduce in SUM_LIKE)
            return self._collective("reduce", (flat,), (flat,), copy_back, async_op, label, algorithm, reduce, dst)
        flat = dense(tensor, complex_as_real=True)
        return self._collective("reduce", (flat,), (), None, async_op, label, algorithm, reduce, dst)

    def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """On rank `dst`, `gather_list[r]` becomes rank r's `tensor`; other ranks pass no list."""
        dst = peer_of(self, "dst", dst)
        is_root = check_root_list(self, "gather_list", gather_list, tensor, root=dst)
        outputs, copy_back = in_place_list(gather_list or ()) if is_root else ((), None)
        return self._collective("gather", (dense(tensor),), outputs, copy_back, async_op, label, peer=dst)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Every rank's `tensor` becomes `scatter_list[rank]` of rank `src`; other ranks pass no list."""
        src = peer_of(self, "src", src)
        check_root_list(self, "scatter_list", scatter_list, tensor, root=src)
        flat, copy_back = in_place(tensor)
        inputs = tuple(dense(t) for t in scatter_list or ())
        return self._collective("scatter", inputs, (flat,), copy_back, async_op, label, peer=src)

    # ------------------------------------------------------------------ all to all

    def all_reduce(
        self,
        tensor: Tensor,
        reduce: Reduction = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Every rank's `tensor` becomes the reduction over all ranks: the same bits everywhere. Equal shapes."""
        check_reduction(reduce, tensor)
        flat, copy_back = in_place(tensor, complex_as_real=reduce in SUM_LIKE)
        return self._collective("all_reduce", (flat,), (flat,), copy_back, async_op, label, algorithm, reduce)

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """`tensor_list[r]` becomes rank r's `tensor`. Sizes may differ between ranks, if every rank's list says so."""
        check_list(self, "tensor_list", tensor_list, tensor)
        outputs, copy_back = in_place_list(tensor_list)
        return self._collective("all_gather", (dense(tensor),), outputs, copy_back, async_op, label, algorithm)

    def all_gather_into_tensor(
        self, output: Tensor, tensor: Tensor, *, algorithm: str | None = None, async_op: bool = False, label: str = ""
    ) -> Work:
        """`output` [W * n] becomes the ranks' `tensor` [n] one after the other; `tensor` may be part of it."""
        check_even(self, "all_gather_into_tensor", whole=output, part=tensor)
        flat, copy_back = in_place(output)
        return self._collective("all_gather", (dense(tensor),), (flat,), copy_back, async_op, label, algorithm)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        reduce: Reduction = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """`output` becomes the reduction of `input_list[rank]` over all ranks. Sizes may differ along the list only."""
        check_list(self, "input_list", input_list, output, "output")
        check_reduction(reduce, output)
        flat, copy_back = in_place(output, complex_as_real=reduce in SUM_LIKE)
        inputs = tuple(dense(t, complex_as_real=True) for t in input_list)
        return self._collective("reduce_scatter", inputs, (flat,), copy_back, async_op, label, algorithm, reduce)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        tensor: Tensor,
        reduce: Reduction = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """`output` [n] becomes this rank's part of the reduction of `tensor` [W * n]; it may be that part itself.

        A wider `output` (float32 for bfloat16 or float16, float64 for float32) takes the sum of widened elements: what
        travels is narrow, what is added is not.
        """
        check_even(self, "reduce_scatter_tensor", whole=tensor, part=output, may_widen=True)
        check_reduction(reduce, output)
        flat, copy_back = in_place(output, complex_as_real=reduce in SUM_LIKE)
        whole = dense(tensor, complex_as_real=True)
        return self._collective("reduce_scatter", (whole,), (flat,), copy_back, async_op, label, algorithm, reduce)

    def all_to_all(
        self,
        output_list: Sequence[Tensor],
        input_list: Sequence[Tensor],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """`output_list[r]` becomes what rank r has in `input_list[rank]`. Sizes may differ; pairs must agree."""
        check_list(self, "output_list", output_list)
        check_list(self, "input_list", input_list, output_list[self.rank], f"output_list[{self.rank}]")
        outputs, copy_back = in_place_list(output_list)
        inputs = tuple(dense(t) for t in input_list)
        return self._collective("all_to_all", inputs, outputs, copy_back, async_op, label, algorithm)

    def barrier(self, *, algorithm: str | None = None, async_op: bool = False, label: str = "") -> Work:
        """Return when every rank has called it."""
        return self._collective("barrier", (), (), None, async_op, label, algorithm)

    # ------------------------------------------------------------------ small JSON objects

    def broadcast_object(self, value: Any = None, src: int = 0, *, label: str = "") -> Any:
        """Rank `src`'s `value` on every rank; what other ranks pass is ignored. Blocks.

        JSON values, at most 1 MiB (so tuples come back as lists and keys as strings): the same holds for the next two.
        Raises: ConfigError where the value cannot travel, and CommError on the other ranks.
        """
        return objects.broadcast_object(self, value, peer_of(self, "src", src), label)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        """The ranks' `value`s, in rank order, on every rank. Blocks."""
        return objects.all_gather_object(self, value, label)

    def gather_object(self, value: Any, dst: int = 0, *, label: str = "") -> list[Any] | None:
        """The ranks' `value`s, in rank order, on rank `dst`; None on the others. Blocks."""
        return objects.gather_object(self, value, peer_of(self, "dst", dst), label)

    # ------------------------------------------------------------------ smaller groups

    def split(self, color: int | None, key: int | None = None, name: str = "") -> Communicator | None:
        """A communicator for the ranks that gave the same `color`, ordered by (`key`, rank); None for color None.

        Collective: every rank of this communicator. The new one has the same device, timeout and layers.
        Raises: ConfigError, on every rank, where a color or key is not an int.
        """
        choices = self.all_gather_object([color, self.rank if key is None else key], label="split")
        groups: dict[int, list[tuple[int, int]]] = {}
        for rank, (rank_color, rank_key) in enumerate(choices):
            if not isinstance(rank_color, int | None) or not isinstance(rank_key, int):
                raise ConfigError(f"split: rank {rank} passed color={rank_color!r}, key={rank_key!r}; both are ints")
            if rank_color is not None:
                groups.setdefault(rank_color, []).append((rank_key, rank))
        ordered = [[rank for _, rank in sorted(groups[group_color])] for group_color in sorted(groups)]
        transport = self.transport.split(ordered)
        return None if transport is None else Communicator(transport, name or f"{self.name}/{color}")

    def mesh(self, **sizes: int) -> Mesh:
        """These ranks as a grid with named axes, `comm.mesh(replica=2, shard=-1)`. Collective: see `Mesh`."""
        from lockstep.comm.mesh import Mesh

        return Mesh(self, sizes)

    # ------------------------------------------------------------------ the door

    def _collective(
        self,
        kind: Kind,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        copy_back: Callable[[], object] | None,
        async_op: bool,
        label: str,
        algorithm: str | None = None,
        reduce: Reduction | None = None,
        peer: int | None = None,
    ) -> Work:
        self._begin(kind)
        op = CommOp(self._collectives, kind, inputs, outputs, peer, reduce, 0, label, (), async_op)
        if algorithm is not None:
            op = by_messages(self, op, algorithm)
        work = self.transport.submit(op)
        self._collectives += 1
        if copy_back is not None:
            work = ThenWork(work, copy_back)
        if not async_op:
            work.wait()
        return work
