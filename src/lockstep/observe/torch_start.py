"""How the ranks of a stock torch program meet: where they may never do so, and in what each of them waits for all."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard
from lockstep.observe.torch_groups import is_the_job, name_of
from lockstep.observe.torch_import import when_imported

MEETING = ("MASTER_ADDR", "MASTER_PORT")
_MEET = timedelta(seconds=5)
_NEW_GROUP, _INIT = "new_group", "init_process_group"  # of all ranks of the job
_HERE = ("localhost", "127.0.0.1", "::1")


def misfits(given: Mapping[str, str], now: Mapping[str, str], call: Mapping[str, Any], rank: int) -> list[str]:
    """What the program has made of its place among the ranks, as "RANK=0, but the launcher gave 1".

    given: MEETING as the launcher set it, now: the environment at the call, call: its arguments, rank: the launcher's.
    """
    found: list[str] = []
    asked = call.get("rank", -1)
    name, value = ("rank", str(asked)) if asked not in (-1, None) else ("RANK", now.get("RANK", str(rank)))
    if value != str(rank):
        found.append(f"{name}={value}, but the launcher gave {rank}")
    by_environment = call.get("store") is None and str(call.get("init_method") or "env://").startswith("env://")
    if by_environment and now.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else rank 0 opens a port of its own
        pairs = {each: (now.get(each, ""), given.get(each, "")) for each in MEETING}
        changed = [each for each, pair in pairs.items() if len(set(pair)) > 1 and not set(pair) <= set(_HERE)]
        found += [f"{each}={now.get(each, '(unset)')}, but the launcher waits at {given.get(each)}" for each in changed]
    return found


def meet_machines(guard: Guard, place: str) -> None:
    """Let `guard` see the ranks of other machines, once the program has torch. place: see `process_guard.STORE`."""
    address, _, prefix = place.partition("/")
    host, _, port = address.rpartition(":")

    def meet() -> None:  # in the guard's thread
        from torch.distributed import PrefixStore, TCPStore

        guard.before_look.remove(meet)
        try:
            guard.meet(PrefixStore(prefix, TCPStore(host, int(port), is_master=False, timeout=_MEET)))
        except RuntimeError as error:
            sys.stderr.write(f"lockstep: ranks of other machines are not seen: {error}\n")

    if place:
        when_imported("torch.distributed", lambda: guard.before_look.append(meet))


@final
class Meetings:
    """Wraps the two calls of torch.distributed that wait for every rank of the job: nobody else sees them stand there.

    Made before the program begins: it keeps what the launcher gave.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._given = {name: os.environ.get(name, "") for name in MEETING}  # by the launcher

    def making(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a group: every rank of the job calls it, in the same order, and waits for the others."""
        signature, made = inspect.signature(old), itertools.count()

        def make(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if given.get("use_local_synchronization") or not is_the_job(self._guard):
                return old(*args, **kwargs)
            ranks = given.get("ranks")
            listed = "all ranks" if ranks is None else name_of("", False, ranks).strip()
            self._guard.group(_NEW_GROUP, range(self._guard.world_size))
            number = self._guard.enter(_NEW_GROUP, next(made), f"new_group {listed}", call_site())
            try:
                return old(*args, **kwargs)
            finally:
                self._guard.leave(number)

        return make

    def meeting(self, old: Callable[..., None]) -> Callable[..., None]:
        """init_process_group: every rank of the job calls it, and waits for the others, by default for 30 minutes."""
        signature, made = inspect.signature(old), itertools.count()

        @functools.wraps(old)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given, site, size = signature.bind(*args, **kwargs).arguments, call_site(), self._guard.world_size
            wanted = max(given.get("world_size", -1), 0) or int(os.environ.get("WORLD_SIZE", size))
            if wanted > size:
                here = f"rank {self._guard.rank}: init_process_group(world_size={wanted}) at {site}"
                why = f"this run has {size} ranks, and nobody starts the others"
                sys.stderr.write(f"lockstep: {here}: {why}. Next: leave world_size and rank out\n")
            if wanted < size:  # a world of its own
                return old(*args, **kwargs)
            for misfit in misfits(self._given, os.environ, given, self._guard.rank):
                here = f"rank {self._guard.rank}: init_process_group at {site}: {misfit}"
                sys.stderr.write(f"lockstep: {here}: the ranks may never meet. Next: leave it as it was\n")
            self._guard.group(_INIT, range(size))
            number = self._guard.enter(_INIT, next(made), _INIT, site)
            try:
                return old(*args, **kwargs)
            finally:
                self._guard.leave(number)

        return init_process_group
