"""A model of the program's that is followed from step to step: what is known of it, and what it says when asked."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

Signs = dict[str, list[Any]]  # of parameters: digests of the gradient and of what each was at first, and its shape


@final
class Model:
    """One that DistributedDataParallel wraps, that FSDP has cut, or that a program keeps equal by itself."""

    def __init__(
        self, module: Any, team: str, kind: str, site: str = "", named: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.module = weakref.ref(module)
        self.team = team
        self.kind = kind  # "ddp"; without it "pieces", of all its ranks, or "hand"; "loose" beside it
        self.site = site  # where it was wrapped
        self.names = [name for name, _ in named]  # of the parameters that DDP averages, in its order
        self._params = [weakref.ref(param) for _, param in named]
        self.sample = [self._params[at] for at in {0, len(named) // 2, len(named) - 1} if named]
        self.forwards: list[Any] = [0, 0, ""]  # of this step: synchronised ones, others, the line of the last of these
        self.brief_after = -1  # the step before the last that was only counted and had a forward
        self.told: list[Any] = []  # as they were told last
        self.is_forwarded = False  # has had a forward that was seen
        self.past = ""  # where a backward first went past DDP
        self.buffers: dict[str, str] = {}  # as they were at the last check
        self.moving: set[str] = set()  # those that have changed
        self.signs: Signs = {}  # as they were applied; none where gradients are averaged for certain
        self.stamps = ((0, self.version()),) * 2  # as the last two steps left it that were looked at closely
        self.is_another = False  # at the end, since the program has changed it after its last step
        self.is_later = False  # at the end, since its optimizer has stepped after the one that counts steps

    @property
    def place(self) -> str:
        """Of a topic: the ranks that hold it, and which model of theirs it is."""
        return self.team if self.kind == "ddp" else f"hand {self.team}"

    @property
    def is_averaged(self) -> bool:
        """Whether it is not the program that averages gradients: then ranks are not meant to differ."""
        has_hook = getattr(self.module(), "_comm_hooks", ()) or getattr(self.module(), "_builtin_hook", None)
        return self.kind == "pieces" or (self.kind == "ddp" and not has_hook)

    @property
    def joins(self) -> bool:
        """Whether ranks may run out of batches at different times: then their steps do not belong together."""
        config = getattr(self.module(), "_join_config", None)
        return config is not None and config.enable

    def version(self) -> list[int]:
        """Another one once the parameters have been changed in place, or put elsewhere, all or those of some part.

        Asked for in every step, so a few stand for all: what a program does to a model between its steps, to load, cast
        or test it, it does to more than one layer.
        """
        found: list[int] = []
        for known in self.sample:
            param = known()
            if param is not None:
                found += (param.data_ptr(), param._version)
        return found

    def is_as_left(self, step: int) -> bool:
        """Whether nobody has changed it since `step`: each step changes it as often as those between the stamps did."""
        (first, before), (last, stamp) = self.stamps
        now = self.version()
        if step == last or len({len(now), len(stamp), len(before)}) > 1:
            return now == stamp
        gains = zip(now, stamp, before, strict=True)
        return all((new - old) * (last - first) == (old - older) * (step - last) for new, old, older in gains)

    def frozen(self) -> list[str]:
        """Names of the parameters that DDP averages and that are not trained any more."""
        params = [known() for known in self._params]
        return [n for n, p in zip(self.names, params, strict=True) if p is not None and not p.requires_grad]
