"""Every backward of this process, seen in one place: of what, from which line, and what it has computed first.

Whoever wants to know of them attaches `BACKWARDS` and reads there. It is in the way of every step, among caches that
the step has filled with other things: so there is one replacement of torch.autograd.backward for all, and one hook on
one parameter. No torch is imported here.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from time import monotonic_ns
from typing import Any, final

from lockstep.observe.call_site import SITES, backward_site, site_from
from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.pace import PACE
from lockstep.observe.patches import SharedPatches, pass_by
from lockstep.observe.profile.phases import BACKWARD, OPTIMIZER, OTHER, TAIL
from lockstep.observe.torch_batches import Timed
from lockstep.observe.torch_import import when_imported

_KEPT = 256  # of one step
SMALL = 1 << 12  # elements of a probe; bytes of what is kept with a loss until the next step that is looked at

Loss = tuple[Any, str]  # (its value, or on a device a tensor that will have it; the line of its backward)


@final
@read_in_c
class Backwards(SharedPatches):
    """Those of one process. Nothing is kept unless somebody has attached it."""

    __slots__ = ("_places", "failed", "is_sound", "losses", "once", "own", "phases", "recent", "scaled", "step_site")

    def _end(self) -> None:
        self.phases: Timed | None = None
        self.once: list[Callable[[], None]] = []  # to be called when the next backward begins
        backward_site[0] = ""  # the line of the last one
        self.step_site = ""  # of the last one of this step
        self.losses: list[Loss] = []  # of this step: who counts steps empties it
        self.recent: list[Loss] = []  # since an optimizer has stepped last: who looks then empties it
        self.own: deque[Any] = deque(maxlen=_KEPT)  # likewise: gradients of probes, before they are averaged
        self.is_sound: bool | None = None  # likewise: whether all losses are finite; None where none is known
        self.probes: list[weakref.ref[Any]] = []  # small parameters
        self.are_shared = False  # ranks share a model, as DistributedDataParallel and fully_shard do it
        self.scaled: tuple[Any, Any] | None = None  # what a GradScaler made of what
        self._plain: Any = None  # torch.Tensor
        self._queue: Any = None
        self._tails_ns: deque[int] = deque(maxlen=1)  # since when the backward that runs waits
        self._tails: list[tuple[Any, Callable[[Any], Any]]] = []  # torch's handles, and what is called to note that
        self.failed: Callable[[BaseException], object] = lambda error: None  # called with what a backward raises
        # torch.autograd, what stands in the place of its backward, and that one
        self._places: tuple[Any, Any, Any] = (None, None, None)

    def _begin(self) -> None:
        self._patches.add(when_imported("torch.autograd", self._watch))

    def follow(self, parameters: Iterable[Any], *, is_sent_by_cpp: bool = False) -> None:
        """Note the gradients of the first small one of a model's `parameters`, before they are averaged.

        is_sent_by_cpp: what backward has not sent when autograd is through it waits for in C++, where nobody can look;
        since when, it notes too.
        """
        from torch.utils.hooks import unserializable_hook

        trained = [param for param in parameters if param.requires_grad and param.is_floating_point()]
        first = next((param for param in trained if param.numel() <= SMALL), None)
        if first is not None and not any(known() is first for known in self.probes):
            self.probes.append(weakref.ref(first))
            # C's, also below: no frame of Python's runs. Torch warns of others who sends the parameter on.
            self._patches.add(first.register_hook(unserializable_hook(partial(self.own.append))).remove)
            if is_sent_by_cpp and self.phases is not None:
                noting = self._tails_ns.append if first.is_cpu else self._queued_all
                waits = map(noting, iter(monotonic_ns, None)).__next__
                queue = unserializable_hook(partial(next, map(self._queue, repeat(waits))))
                handle = first.register_hook(queue)  # called back before DDP, which asks later
                self._tails = [tail for tail in self._tails if tail[0].hooks_dict_ref() is not None]
                self._tails.append((handle, queue))
                self._patches.add(handle.remove)

    def _queued_all(self, now_ns: int) -> None:
        """Autograd has queued the last of a backward to a device."""
        self._tails_ns.append(now_ns)
        if self.phases is not None and self.phases.clock.gpu is not None:
            self.phases.clock.gpu.stamp(now_ns)

    def turned(self, is_brief: bool, *, is_marked: bool) -> None:
        """Of steps that are only counted it is not noted since when backward waits, from here on; or it is again.

        is_marked: by our own loop, which looks at its losses itself: then such steps call torch as it comes.
        """
        autograd, ours, stock = self._places
        there, other = (ours, stock) if is_brief and is_marked and not self.once else (stock, ours)
        if autograd is not None and autograd.backward is there:
            autograd.backward = other
        for handle, queue in self._tails:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and is_brief:
                hooks.pop(handle.id, None)  # torch calls what was there when it began
            elif hooks is not None:
                hooks[handle.id] = queue

    def _watch(self) -> None:
        from torch import Tensor, autograd

        self._plain = Tensor  # asking a subclass for its value may be a collective
        self._queue = autograd.Variable._execution_engine.queue_callback
        self._patches.replace(autograd, "backward", partial(self._seeing, autograd))

    def _seeing(self, autograd: Any, old: Callable[..., None]) -> Callable[..., None]:
        method = self._plain.backward.__code__  # as a rule between the user's line and this

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            try:
                if self._places[1] is not backward:  # put back by somebody who had wrapped it meanwhile
                    return old(tensors, *args, **kwargs)
                is_brief = PACE.is_brief
                if is_brief and not self.once and self.scaled is None and type(tensors) is self._plain:
                    is_single = tensors.numel() == 1
                    is_kept = is_single and tensors.is_cuda and len(self.recent) < _KEPT
                    if is_kept and tensors.untyped_storage().nbytes() <= SMALL:
                        self.recent.append((tensors.detach(), backward_site[0]))  # its value is asked for later
                    value = tensors.item() if is_single and tensors.is_cpu else 0.0
                    if value - value == 0.0:  # not of inf, nor of nan
                        self.step_site = backward_site[0]
                        return old(tensors, *args, **kwargs)
                frame = sys._getframe(1)
                if frame.f_code is method and frame.f_back is not None:
                    frame = frame.f_back
                known = SITES.get((id(frame.f_code), frame.f_lasti))
                site = known[1] if known is not None and known[2] else site_from(frame)
                self.step_site = backward_site[0] = site
                if self.once:
                    calls, self.once = self.once, []
                    for call in calls:
                        call()
                if type(tensors) is self._plain and tensors.numel() == 1 and tensors.is_floating_point():
                    root = tensors
                    if self.scaled is not None:
                        root = self.scaled[1] if self.scaled[0] is root else root
                        self.scaled = None
                    loss = root.item() if root.is_cpu else root.detach(), site
                    if type(loss[0]) is float and self.is_sound is not False:
                        self.is_sound = loss[0] - loss[0] == 0.0  # not of inf, nor of nan
                        if not self.is_sound:
                            PACE.turn(is_brief=False)  # the gradients are looked at
                    elif type(loss[0]) is not float and self.phases is not None:
                        self.phases.clock.device = root.get_device()
                    if len(self.losses) < _KEPT:
                        self.losses.append(loss)
                    if len(self.recent) < _KEPT:
                        self.recent.append(loss)
                phases, tails_ns = self.phases, self._tails_ns
                before = -1 if is_brief or phases is None or not phases.owner else phases.clock.switch(BACKWARD)
                if phases is None or before in (-1, BACKWARD):  # of another thread, or inside one, as checkpointing is
                    return old(tensors, *args, **kwargs)
                tails_ns.clear()
                try:
                    return old(tensors, *args, **kwargs)
                finally:
                    clock = phases.clock
                    if tails_ns:
                        clock.tail_site = site
                        clock.waited(TAIL, tails_ns[-1], monotonic_ns())
                    clock.switch(before if before == OPTIMIZER else OTHER)
            except RuntimeError as error:  # of an operation that C++ has started, say
                self.failed(error)
                raise

        plain = backward
        backward = in_c(plain, (old, method, self, backward_site, SITES, self._plain, PACE))
        pass_by(functools.update_wrapper(plain, old))
        self._places = autograd, backward, old
        return backward


BACKWARDS = Backwards()
