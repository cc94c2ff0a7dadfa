"""Parameters still on their way when `step` has returned: whoever reads one through its module waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any, final

from torch import Tensor
from torch.nn import Module

from lockstep.comm.farewell import before_close
from lockstep.comm.op import DONE, AllWork, Work
from lockstep.errors import CommError, ConfigError
from lockstep.parallel.zero.chunk import Chunk

_EXIT_S = 5.0  # what the end of a group or process waits for parameters that nobody has read


@final
class LateParameters:
    """The gathers under way for parameters of `module`.

    A module waits before its forward for the parameters it owns; attributes, `parameters()` and `state_dict()` of any
    module of it wait for those they give out. So no reader has to know, but one that holds a parameter itself.
    """

    def __init__(self, module: Module) -> None:
        self._places: dict[int, int] = {}  # id of a parameter -> its place among all, in order of registration
        self._owners: dict[int, list[Module]] = {}
        self._works: dict[int, Work] = {}
        for place, param in enumerate(module.parameters()):
            self._places[id(param)] = place
        for owner in module.modules():
            own = [param for param in owner._parameters.values() if param is not None]
            for param in own:
                self._owners.setdefault(id(param), []).append(owner)
            if own:
                owner.register_forward_pre_hook(self._before_forward, prepend=True)
        before_close(self._finish)

    def check(self, param: Tensor, name: str) -> None:
        """Raises: ConfigError for a parameter that the module has not, which nothing would wait for."""
        if id(param) not in self._places:
            raise ConfigError(
                f"overlap_forward: {name} is no parameter of this module, whose forward would not wait for it; pass "
                "the module that has all parameters of the optimizer"
            )

    def place(self, chunk: Chunk) -> int:
        """Where in the module the first parameter of a chunk is: early ones are needed early."""
        return min(self._places[id(param)] for param in chunk.params)

    def add(self, chunk: Chunk, work: Work) -> None:
        """Let readers of the chunk's parameters wait for `work`."""
        if work is DONE:
            return
        for param in chunk.params:
            self._works[id(param)] = work
            for owner in self._owners[id(param)]:
                known: Any = owner._parameters
                if isinstance(known, _Waiting) and known.late is not self:
                    known.late.wait()  # another optimizer steps other parameters of this module
                if not isinstance(owner._parameters, _Waiting):
                    owner.__dict__["_parameters"] = _Waiting(owner._parameters, self)

    def wait(self) -> None:
        """Have all of them. Raises: CommError, again and again, where a gather has failed."""
        for work in dict.fromkeys(self._works.values()):
            self._end(work)

    def wait_for(self, param: Tensor | None) -> None:
        """Have this one, and what comes with it."""
        work = self._works.get(id(param))
        if work is not None:
            self._end(work)

    def __reduce__(self) -> tuple[Any, ...]:
        return LateParameters, (Module(),)  # the hooks of a copied module have nothing to wait for

    def _end(self, work: Work) -> None:
        work.wait()
        for key in [key for key, of in self._works.items() if of is work]:
            self._works.pop(key, None)
            for owner in self._owners[key]:
                known: Any = owner._parameters
                if isinstance(known, _Waiting) and not any(id(param) in self._works for param in known.kept.values()):
                    owner.__dict__["_parameters"] = known.kept

    def _finish(self) -> None:
        with contextlib.suppress(CommError):  # nobody has read these parameters
            AllWork(list(dict.fromkeys(self._works.values()))).wait(_EXIT_S)

    def _before_forward(self, module: Module, _: Any) -> None:
        if isinstance(module._parameters, _Waiting):
            for param in tuple(module._parameters.kept.values()):  # some modules keep lists of their parameters
                self.wait_for(param)


@final
class _Waiting(MutableMapping[str, Any]):
    """Stands for a module's dict of parameters, `kept`, as long as some of them are on their way."""

    def __init__(self, kept: dict[str, Any], late: LateParameters) -> None:
        self.kept = kept
        self.late = late

    def __getitem__(self, name: str) -> Any:
        param = self.kept[name]
        self.late.wait_for(param)
        return param

    def __contains__(self, name: object) -> bool:
        return name in self.kept

    def __setitem__(self, name: str, param: Any) -> None:
        self.kept[name] = param

    def __delitem__(self, name: str) -> None:
        del self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy of the module has its parameters
