"""ZeRO-1: every rank keeps the optimizer's state for its part of the parameters, steps that, and tells the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import TensorPieces, is_dtensor
from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.zero.chunk import UNFUSED_ELEMENTS, Chunk, ReplicatedChunk
from lockstep.parallel.zero.overlap import ReduceScatterMean
from lockstep.parallel.zero.pieces import PerParameter, PieceOptimizer
from lockstep.parallel.zero.probe import OptimizerClass, runs_fused, why_not_elementwise
from lockstep.parallel.zero.share import Member, Share, share_buckets, share_local, share_whole
from lockstep.parallel.zero.state import (
    Group,
    StateDict,
    States,
    flat_states,
    gather_states,
    new_groups,
    states_in_pieces,
)


@final
class ShardedOptimizer(Optimizer):
    """Runs `optimizer_cls` on this rank's part of the parameters; `step` then gathers the updated ones on all ranks.

    `params` and `kwargs` are what `optimizer_cls` takes. The step is that of `optimizer_cls` on one process with the
    same gradients. These must be the mean over the ranks, on every rank: of DistributedDataParallel (ours or torch's),
    of `average_gradients`, or of your own.

    - `process_group`: a torch group, a Communicator, or None for torch's default group.
    - `ddp`: our DistributedDataParallel around the same parameters. Its buckets are then reduced to their owners during
      backward, half the bytes of an all-reduce, and `.grad` is None after it. `lockstep.clip_grad_norm_` and our
      GradScaler find the gradients; torch's do not. They add up over several backward passes until `step` or this
      object's `zero_grad` clears them; the model's own `zero_grad` does not see them.
    - `assume_elementwise`: skip the trial that finds optimizers which cannot work on pieces of a parameter, because
      they look at whole rows or norms (Muon, Adafactor, LBFGS). For a class whose step is elementwise but random.

    Parameters that are DTensors, those of `fully_shard`, are stepped where they are, without communication. Where the
    class has a fused implementation it is used, unless `fused` or `foreach` is given.

    Collective: construction, `add_param_group`, `step` and `state_dict()`, by every rank of the group.
    Memory: parameters move into flat buffers, and keep shape and strides; of the optimizer's state 1/W is here.
    Raises: UnsupportedArgument for an optimizer that is not elementwise; ModelMismatch where ranks differ.
    Source: Rajbhandari et al. 2020, arXiv 1910.02054 (stage 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: OptimizerClass,
        *,
        process_group: Any = None,
        ddp: DistributedDataParallel | None = None,
        assume_elementwise: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("differentiable"):
            raise UnsupportedArgument("differentiable", "pieces of a parameter are no part of a graph")
        if ddp is not None and process_group is not None:
            raise ConfigError("pass ddp or process_group, not both: with ddp its group is used")
        defaults = optimizer_cls([torch.zeros(2, 2)], **kwargs).defaults
        refusal = None if assume_elementwise else why_not_elementwise(optimizer_cls, kwargs)
        if refusal is not None:
            raise UnsupportedArgument(
                f"optimizer_cls={getattr(optimizer_cls, '__name__', optimizer_cls)}",
                f"{refusal}. Use it without ShardedOptimizer, or pass assume_elementwise=True if this is wrong",
            )
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._process_group, self._ddp = process_group, ddp
        self._comm: Communicator | None = None
        self._parts: list[PieceOptimizer] = []
        self._home: dict[int, tuple[PieceOptimizer, int]] = {}  # id of a parameter -> its part, and its index there
        self._overlap: ReduceScatterMean | None = None  # feeds the first parts, one for each of its buckets
        self._consolidated: tuple[int, StateDict] | None = None  # the rank that has it, and what it has
        super().__init__(params, defaults)
        self._share_out(0)

    @property
    def comm(self) -> Communicator:
        """The ranks that share the state of the parameters which all of them hold whole."""
        if self._comm is None:
            given = self._process_group if self._ddp is None else self._ddp.reducer.comm
            self._comm = given if isinstance(given, Communicator) else torch_names.communicator_over(given)
        return self._comm

    # ------------------------------------------------------------------ sharing out

    def add_param_group(self, param_group: Group) -> None:
        """Optimize further parameters. Collective: every rank, with the same ones."""
        super().add_param_group(param_group)
        if not self._parts:
            return  # the constructor shares out all groups together
        try:
            self._share_out(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._consolidated = None

    def _share_out(self, first: int) -> None:
        """Give the parameters of the groups from `first` on their places."""
        members = list(self._members(first))
        if not members:
            return
        are_floats = all(member.param.is_floating_point() for member in members)
        fuse = are_floats and runs_fused(self._optimizer_cls, self._kwargs, members[0].param.device)
        build = partial(self._optimizer_cls, **({**self._kwargs, "fused": True} if fuse else self._kwargs))
        longest = UNFUSED_ELEMENTS if members[0].param.is_cpu and not build.keywords.get("fused") else None
        whole = [member for member in members if not is_dtensor(member.param)]
        local = [member for member in members if is_dtensor(member.param)]
        shares: list[Share] = []
        if self._ddp is not None and self._overlap is None:
            self._overlap, shares, whole = share_buckets(whole, self._ddp, longest)
        if whole:
            shares += share_whole(whole, self.comm, longest)
        if local:
            shares.append(share_local(local, longest))
        for chunk, groups in shares:
            part = PieceOptimizer(chunk, groups, self.param_groups, build, fuse)
            self._parts.append(part)
            self._home.update({id(param): (part, index) for index, param in enumerate(chunk.params)})

    def _members(self, first: int) -> Iterator[Member]:
        for number, group in enumerate(self.param_groups[first:], first):
            params = group["params"]
            names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(params))]
            unique = {id(param): Member(param, name, number) for param, name in zip(params, names, strict=True)}
            yield from unique.values()

    # ------------------------------------------------------------------ a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part, and have everybody's when it returns. Collective: every rank.

        A parameter without gradient is left alone, with its state, as long as it has none on any rank.
        Raises: ConfigError before anything is sent, for parameters that were moved or gradients that are sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated = None
        with torch.no_grad(), contextlib.ExitStack() as ends:
            for part, mine in zip(self._parts, self._gradients(), strict=True):
                ends.callback(part.step(mine, self.param_groups).wait)  # sent while the next is stepped
        if self._overlap is not None:
            self._overlap.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that backward has left with their owners (`ddp`)."""
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.clear()

    def _gradients(self) -> list[list[Tensor | None]]:
        """For each part, the gradients of its pieces."""
        for part in self._parts:
            part.chunk.adopt()
            part.chunk.check_gradients()
        joined = [] if self._overlap is None else [self._overlap.gradients(k) for k in range(len(self._overlap.chunks))]
        arrived = [*joined, *({} for _ in self._parts[len(joined) :])]
        return [part.chunk.gradients(given) for part, given in zip(self._parts, arrived, strict=True)]

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Parameter -> what is kept for it: of a DTensor a DTensor, of a whole parameter this rank's elements, flat."""
        return PerParameter(self._parts)

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            raise ConfigError("the state of a ShardedOptimizer cannot be assigned: use load_state_dict")

    def state_dict(self) -> StateDict:
        """What `optimizer_cls` over the whole parameters would give; a DTensor's state is DTensors.

        It loads into ShardedOptimizer at any world size, and into `optimizer_cls`. `consolidate_state_dict` before it
        needs less memory; then only the rank that has the state may call this.
        Collective: every rank, unless consolidated since the last step.
        """
        return self._hooked(self._whole)

    def state_dict_in_pieces(self) -> StateDict:
        """`state_dict()` with TensorPieces of this rank's elements where parameters are whole: nothing is gathered.

        `load_state_dict` takes it on ranks that share the parameters in the same way.
        Collective: every rank; a few bytes travel. Memory: no copy.
        """
        return self._hooked(self._in_pieces)

    def _hooked(self, save: Callable[[], StateDict]) -> StateDict:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        result = save()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, on the CPU; its `state_dict()` returns it, until the next step.

        As in torch's ZeroRedundancyOptimizer, whose state_dict loads at the world size of its making only.
        Collective: every rank. Memory: on the other ranks what one chunk takes.
        """
        self._consolidated = (to, self._gather(to))

    def load_state_dict(self, state_dict: StateDict, *, copy: bool = True) -> None:
        """Take what `state_dict` gave, here or in `optimizer_cls`, or `state_dict_in_pieces`. Not collective.

        copy: else pieces of this rank's become the optimizer's own, and nobody else's.
        Raises: CheckpointError where it is of other parameters, or of another rank's elements.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = new_groups(state_dict["param_groups"], self.param_groups)
        states = flat_states(state_dict, self._places())
        for own, new in zip(self.param_groups, groups, strict=True):
            own.clear()
            own.update(new)
        for part in self._parts:
            part.load(states[part.chunk], self.param_groups, copy)
        self._consolidated = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _whole(self) -> StateDict:
        if self._consolidated is None:
            return self._gather(None)
        rank, found = self._consolidated
        if rank != self.comm.rank:
            raise ConfigError(
                f"rank {self.comm.rank}: the state was consolidated on rank {rank}, call state_dict() there; or call "
                "it on every rank without consolidate_state_dict()"
            )
        return found

    def _gather(self, to: int | None) -> StateDict:
        found: dict[Chunk, States] = {}
        for part in self._parts:
            chunk, mine = part.chunk, part.states()
            found[chunk] = gather_states(chunk, mine, to) if isinstance(chunk, ReplicatedChunk) else mine
        return self._numbered(found)

    def _in_pieces(self) -> StateDict:
        found: dict[Chunk, States] = {part.chunk: part.states() for part in self._parts}
        shared = [chunk for chunk in found if isinstance(chunk, ReplicatedChunk)]
        if shared:
            found.update(zip(shared, states_in_pieces(self.comm, shared, [found[c] for c in shared]), strict=True))
        return self._numbered(found)

    def room_of(self, param: Tensor, dtype: torch.dtype) -> TensorPieces:
        """Memory for state of a whole parameter's elements, of which this rank has a share: for `load_state_dict`."""
        part, index = self._home[id(param)]
        assert isinstance(part.chunk, ReplicatedChunk), "state of a DTensor is a DTensor"
        start, stop = part.chunk.range_of(index)
        return part.chunk.in_pieces(index, torch.empty(stop - start, dtype=dtype, device=part.chunk.flat.device))

    def _numbered(self, found: Mapping[Chunk, States]) -> StateDict:
        """torch's form: parameters by their place in `param_groups`."""
        ordered, places = self._ordered(), self._places()
        numbers = {id(param): number for number, param in reversed(list(enumerate(ordered)))}
        states = {numbers[id(p)]: found[chunk].get(index) for p, (chunk, index) in zip(ordered, places, strict=True)}
        groups = [{**group, "params": [numbers[id(param)] for param in group["params"]]} for group in self.param_groups]
        return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}

    def _ordered(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _places(self) -> list[tuple[Chunk, int]]:
        homes = [self._home[id(param)] for param in self._ordered()]
        return [(part.chunk, index) for part, index in homes]

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("a ShardedOptimizer cannot be copied or pickled: save its state_dict()")
