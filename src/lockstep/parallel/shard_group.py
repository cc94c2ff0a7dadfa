"""One unit's parameters of one dtype: sharded between uses, whole while a module computes with them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch.nn import Module, Parameter

from lockstep.comm.op import DONE, Work
from lockstep.errors import ShardingError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.kept_part import KeptPart
from lockstep.parallel.shard_extension import Extended
from lockstep.parallel.shard_face import Face
from lockstep.parallel.shard_layout import Cut, ShardLayout
from lockstep.parallel.shard_mesh import ShardMesh, grid_of
from lockstep.parallel.shard_pieces import ShardPieces
from lockstep.parallel.shard_slot import ShardSlot, put_into, slot_of
from lockstep.parallel.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from lockstep.parallel.unsharded import Gathered, Resident, Unsharded

# Life of the tensors here, for n elements over W ranks, S = n / W and padding:
#   pieces            live as long as the group, one after the other in a flat tensor [S]; where ranks share memory,
#                     each in its place in the whole that all see.
#   params[i]         piece i as a DTensor: the module's parameter between uses.
#   wholes[i]         alias of the unsharded flat buffer: the module's parameter in forward and backward, and the leaf
#                     of autograd's graph. Its .grad lives until it is copied into a reduction.

TAKEN = "_lockstep_sharded_as"  # on a parameter that a group has replaced: its name there


class ShardState(enum.Enum):
    """SHARDED: the module has the DTensors. GATHERING: the gather is under way. UNSHARDED: it has the whole tensors."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()


class Owner(NamedTuple):
    """A module and the name under which it has a parameter; a tied parameter has several."""

    module: Module
    name: str


class Member(NamedTuple):
    """A parameter to be sharded."""

    param: Parameter
    owners: tuple[Owner, ...]
    dim: int
    fqn: str
    face: Face


@final
class ShardGroup:
    """A small state machine over the parameters that are gathered together.

    Collective: `place`, `launch` and what is built on them, on every rank of `mesh.shard`, in the same order.
    """

    def __init__(
        self, members: Sequence[Member], mesh: ShardMesh, policy: MixedPrecisionPolicy, offload: CPUOffloadPolicy | None
    ) -> None:
        self.mesh = mesh
        self.comm = mesh.shard
        self.replicate_comm = mesh.replicate
        self.fqns = [member.fqn for member in members]
        self.owners = [member.owners for member in members]
        self.faces = [member.face for member in members]
        self.layout = ShardLayout([Cut(m.face.shape, m.dim) for m in members], self.comm.world_size)
        self.policy = policy
        self.compute_dtype = policy.param_dtype if members[0].param.is_floating_point() else None
        self.device = mesh.device
        self.state = ShardState.SHARDED
        self.unsharded: Unsharded | None = None
        self._shows_part = False  # the modules have what `kept_part` shows
        whole = [member.param for member in members]
        self.pieces = ShardPieces(whole, self.layout, self.comm, self.device, offload, self.fqns[0])
        self.params = [self._sharded(index, member.param) for index, member in enumerate(members)]
        self.wholes: list[Parameter] = []
        self._whole_versions: list[int] = []
        for member, name in zip(members, self.fqns, strict=True):
            vars(member.param)[TAKEN] = name  # whoever still has the whole parameter shares it with this group
        self._register(self.params)

    def __repr__(self) -> str:
        return f"<ShardGroup {', '.join(self.fqns[:2])}{', ...' if len(self.fqns) > 2 else ''}: {self.state.name}>"

    @property
    def label(self) -> str:
        """A short name for messages and traces."""
        return self.fqns[0] if len(self.fqns) == 1 else f"{self.fqns[0]}+{len(self.fqns) - 1}"

    @property
    def dtype(self) -> torch.dtype:
        """What modules compute with."""
        return self.compute_dtype or self.pieces.dtype

    # ------------------------------------------------------------------ unshard and reshard

    def place(self, sharing: bool, parts: int | None = None) -> None:
        """Decide where the whole parameters will be. Collective: every rank of `mesh.shard`; later calls do nothing.

        parts: how many neighbours keep the gathered whole in parts, from forward to backward.
        """
        if self.unsharded is not None:
            return
        if self.pieces.home.type == "meta":
            raise ShardingError(
                f"parameter {self.fqns[0]!r} is on the meta device: fill the model first, with lockstep.materialize("
                "model) or lockstep.load_safetensors(model, path)"
            )
        with torch.no_grad(), torch.inference_mode(False):
            self.unsharded = self._find_place(sharing, parts)
            self.wholes = [
                face.whole(view, param.requires_grad)
                for face, view, param in zip(self.faces, self.unsharded.views, self.params, strict=True)
            ]

    def _find_place(self, sharing: bool, parts: int | None) -> Unsharded:
        layout, comm, pieces = self.layout, self.comm, self.pieces
        if pieces.is_extended:
            like = torch.empty(layout.cuts[0].shape, device="meta")
            around = (self.mesh.device_mesh, like.shape, like.stride(), self.owners[0][0].module, self.policy)
            return Extended(pieces.tensors[0], comm, around, self.dtype, self.label)
        assert pieces.flat is not None, "pieces are in one flat tensor until they find a place in a whole"
        is_same = (self.dtype, self.device) == (pieces.dtype, pieces.home)
        if comm.world_size == 1 and is_same:
            return Resident(layout, pieces.flat, comm.rank, is_copy=False)
        if sharing and comm.world_size > 1 and self.device.type == "cpu" and layout.whole_numel:
            whole = comm.shared(layout.whole_numel, self.dtype)
            if whole is not None:
                is_copy = not is_same or any(cut.dim for cut in layout.cuts)
                resident = Resident(layout, whole, comm.rank, is_copy)
                if not is_copy:
                    resident.write(pieces.tensors)
                    pieces.move(resident.mine)
                    for param, piece in zip(self.params, pieces.tensors, strict=True):
                        param._local_tensor = piece  # pyright: ignore[reportAttributeAccessIssue]
                return resident
        gathered = Gathered(layout, self.dtype, self.device, comm, self.label)
        return gathered if parts is None else KeptPart(gathered, layout, grid_of(comm, parts), self.label)

    def publish(self) -> None:
        """Bring the copy that all ranks see up to date. The caller sees to it that nobody reads meanwhile."""
        if isinstance(self.unsharded, Resident) and self.unsharded.is_copy:
            with torch.no_grad():
                self.unsharded.write(self.pieces.tensors)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks of the host see the same whole parameters."""
        return isinstance(self.unsharded, Resident) and self.comm.world_size > 1

    @property
    def is_copied(self) -> bool:
        """Whether what they see is a copy, in another dtype say, of what the optimizer changes."""
        return isinstance(self.unsharded, Resident) and self.unsharded.is_copy

    def changed_wholes(self) -> list[str]:
        """Parameters that were changed in place while whole, in memory that all ranks see."""
        if not self.is_shared or not self._whole_versions:
            return []
        versions = zip(self.fqns, self.wholes, self._whole_versions, strict=True)
        return [fqn for fqn, whole, version in versions if whole._version != version]

    def launch(self) -> Work:
        """Begin to make the parameters whole; where they are, only give the other ranks this one's shard.

        Returns what that takes. After an error call it again: it begins what had not begun.
        """
        assert self.unsharded is not None, "placed before the first use"
        with torch.no_grad():
            flat = self.pieces.flat
            flat = None if flat is None else flat.to(self.device, non_blocking=True)
            if self.state is not ShardState.SHARDED:
                return self.unsharded.contribute(flat)
            self.unsharded.launch(flat)
        self.state = ShardState.GATHERING
        return DONE

    def finish(self) -> None:
        """Let the modules have the whole parameters."""
        if self.state is ShardState.UNSHARDED:
            return
        assert self.unsharded is not None
        assert self.state is ShardState.GATHERING or not self.unsharded.needs_gather, "launched by all ranks together"
        with torch.no_grad():
            self.unsharded.finish()
        for param, whole in zip(self.params, self.wholes, strict=True):
            if whole.requires_grad != param.requires_grad:
                whole.requires_grad_(param.requires_grad)
        self._whole_versions = [whole._version for whole in self.wholes]
        self._register(self.wholes)
        self._shows_part = False
        self.state = ShardState.UNSHARDED

    def reshard(self, shows_part: bool = False) -> None:
        """Let the modules have the shards, or the kept parts; give the memory of the whole parameters back."""
        if self.state is not ShardState.SHARDED:
            assert self.unsharded is not None
            self.unsharded.release()
            part = self.kept_part if shows_part else None
            self._register(self.params if part is None else part.faces(self.params))
            self._shows_part = part is not None
            self.state = ShardState.SHARDED
        elif self._shows_part and not shows_part:
            self._register(self.params)
            self._shows_part = False

    @property
    def kept_part(self) -> KeptPart | None:
        """Where the whole parameters are, if parts of them stay between forward and backward."""
        return self.unsharded if isinstance(self.unsharded, KeptPart) else None

    def forget_part(self) -> None:
        """Gather from the shards next."""
        if self.kept_part is not None:
            self.kept_part.forget()
        if self._shows_part:
            self.reshard()

    def _register(self, params: Sequence[Parameter]) -> None:
        for owners, param in zip(self.owners, params, strict=True):
            for module, name in owners:
                module._parameters[name] = param

    # ------------------------------------------------------------------ parameters that others changed

    def check(self) -> None:
        """Take over parameters that were replaced since (load_state_dict with assign, swapped tensors).

        Raises: ShardingError where one was removed, or replaced by something that is no such shard.
        """
        if self.state is ShardState.UNSHARDED:
            return
        for index, param in enumerate(self.params):
            is_ours = self._found(index) is param and slot_of(param) is not None
            if not is_ours or not self.pieces.are_at(index, local_tensor(param)):
                self.adopt()
                return

    def _found(self, index: int) -> Parameter | None:
        """What the modules have for a parameter; where only one of several that share it has another, that one."""
        param = self.params[index]
        held = (module._parameters.get(name) for module, name in self.owners[index])
        return next((found for found in held if found is not param), param)

    def check_loaded(self, module: Module) -> None:
        """Raises: ShardingError where a state dict put a parameter of another dtype into `module`; it is out again."""
        for fqn, owners, param in zip(self.fqns, self.owners, self.params, strict=True):
            for owner in owners:
                loaded = module._parameters.get(owner.name) if owner.module is module else None
                if loaded is not None and loaded is not param and loaded.dtype != self.pieces.dtype:
                    module._parameters[owner.name] = param
                    raise ShardingError(
                        f"rank {self.mesh.whole.rank}: the state dict has {fqn!r} in {loaded.dtype}, the sharded model "
                        f"in {self.pieces.dtype}: convert the one that is wrong, or load without assign=True"
                    )

    def adopt(self) -> None:
        """Let the pieces have the values, dtype and device of the parameters the modules have now."""
        current = [self._found(index) for index in range(len(self.params))]
        for index, param in enumerate(current):
            self._check_adoptable(index, param)
        if self.pieces.take([local_tensor(param) for param in current if param is not None], self.label):
            self.unsharded = None
        self.params = [self._put_into(index, param) for index, param in enumerate(current)]
        self._register(self.params)

    def _check_adoptable(self, index: int, param: Parameter | None) -> None:
        expected = self.layout.piece_shape(index, self.comm.rank)
        found = None if param is None else tuple(local_tensor(param).shape)
        if not isinstance(param, DTensor) or found != expected:
            what = "was removed" if param is None else f"is now a {type(param).__name__} with {found} on this rank"
            raise ShardingError(
                f"rank {self.mesh.whole.rank}: parameter {self.fqns[index]!r} was sharded, {expected} on this rank, "
                f"and {what}. Change parameters before fully_shard, or in place"
            )

    # ------------------------------------------------------------------ making

    def _sharded(self, index: int, param: Parameter) -> Parameter:
        """What stands in the place of `param` between uses, with the attributes that users have given it."""
        sharded = Parameter(self.faces[index].piece(self.pieces.tensors[index]), requires_grad=param.requires_grad)
        vars(sharded).update({key: value for key, value in vars(param).items() if key not in vars(sharded)})
        return self._put_into(index, sharded)

    def _put_into(self, index: int, param: Any) -> Parameter:
        """`param`, a DTensor, with our piece; it stays the same object, for its optimizer's sake."""
        param._local_tensor = self.pieces.tensors[index]
        put_into(ShardSlot(self, index), param)
        return param
