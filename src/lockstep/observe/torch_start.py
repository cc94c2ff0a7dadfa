"""How the ranks of a stock torch program meet: where they may never do so, and in what each of them waits for all."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from time import monotonic_ns
from typing import Any, final
from urllib.parse import urlsplit

from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.process_guard import STORE
from lockstep.observe.scene import INIT, NEW_GROUP
from lockstep.observe.torch_groups import is_the_job, name_of
from lockstep.observe.torch_import import when_imported

_ADDRESS, _PORT, _AGENTS = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
_MEET = timedelta(seconds=5)
_UNWATCHED = "are ranks of their own: nobody watches them. Next: leave that out, `lockstep run -n N` starts N ranks"
_HERE = ("localhost", "127.0.0.1", "::1")


def misfits(given: Mapping[str, str], now: Mapping[str, str], call: Mapping[str, Any], rank: int) -> list[str]:
    """What the program has made of its place among the ranks, as "RANK=0, but the launcher gave 1".

    given: the environment as the launcher set it, now: at the call, call: its arguments, rank: the launcher's.
    """
    found: list[str] = []
    asked = call.get("rank", -1)
    name, value = ("rank", str(asked)) if asked not in (-1, None) else ("RANK", now.get("RANK", str(rank)))
    if value != str(rank):
        found.append(f"{name}={value}, but the launcher gave {rank}")
    by_environment = call.get("store") is None and str(call.get("init_method") or "env://").startswith("env://")
    host, expected = now.get(_ADDRESS, "(unset)"), given.get(_ADDRESS, "")
    if by_environment and now.get(_AGENTS) == "True" and host != expected and not {host, expected} <= {*_HERE}:
        found.append(f"{_ADDRESS}={host}, but the launcher waits at {expected}")
    return found


def own_port(given: Mapping[str, str], now: Mapping[str, str], call: Mapping[str, Any]) -> str:
    """Where the program wants its ranks to meet, if not at the launcher's port; see `misfits`."""
    method = str(call.get("init_method") or "env://")
    asked = now.get(_PORT, "") if method.startswith("env:") else str(urlsplit(method).port or "")
    return asked if call.get("store") is None and asked != given.get(_PORT, "") else ""


def meet_machines(guard: Guard, place: str) -> None:
    """Let `guard` see the ranks of other machines, once the program has torch. place: see `process_guard.STORE`."""
    address, _, prefix = place.partition("/")
    host, _, port = address.rpartition(":")

    def meet() -> None:  # in the guard's thread
        from torch.distributed import PrefixStore, TCPStore

        guard.before_look.remove(meet)
        try:
            guard.board.use(PrefixStore(prefix, TCPStore(host, int(port), is_master=False, timeout=_MEET)))
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
        self._given = dict(os.environ)  # by the launcher
        self._groups, self._worlds, self._given_stores = itertools.count(), itertools.count(), itertools.count()

    def make(self, old: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What makes a group: every rank of the job calls it, in the same order, and waits for the others."""
        given = inspect.signature(old).bind(*args, **kwargs).arguments
        if given.get("use_local_synchronization") or not is_the_job(self._guard):
            return old(*args, **kwargs)
        ranks = given.get("ranks")
        listed = "all ranks" if ranks is None else name_of("", False, ranks).strip()
        self._guard.group(NEW_GROUP, range(self._guard.world_size))
        began_ns = monotonic_ns()
        number = self._guard.enter(NEW_GROUP, next(self._groups), f"new_group {listed}", call_site())
        try:
            return old(*args, **kwargs)
        finally:
            self._guard.recorder.stood(number, began_ns)

    def meet(self, old: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """init_process_group: every rank of the job calls it, and waits for the others, by default for 30 minutes."""
        bound, site, size = inspect.signature(old).bind(*args, **kwargs), call_site(), self._guard.world_size
        given = bound.arguments
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
        self._guard.group(INIT, range(size))
        port = own_port(self._given, os.environ, given)
        began_ns = monotonic_ns()
        number = self._guard.enter(INIT, next(self._worlds), f"{INIT}:port={port}" if port else INIT, site)
        if (store := given.get("store")) is not None:  # a new one may lead to the same server, the launcher's
            given["store"] = _anew(store, next(self._given_stores))
        look = self._guard.look if self._given.get(STORE) else bool
        look()  # all have said how they are before any comes through: so whoever is cut off then is missed
        try:
            return old(*bound.args, **bound.kwargs)
        finally:
            self._guard.recorder.stood(number, began_ns)
            look()


@final
class Worlds:
    """The worlds that a program makes with torch, one after the other: each of them meets afresh, where it wants to.

    Torch tells them apart by nothing: in a store that stays, a world finds the addresses of the one before. And where
    the launcher holds the store, torch lets nobody listen at a port that the program has chosen.
    """

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        """given: by the launcher, to the rank that has started this process; None in a rank itself."""
        self._given, self._pid = dict(given or os.environ), 0 if given else os.getpid()
        self._before = Counter[object]()  # worlds, by where they met
        self._held: Any = None  # the newest store: it stays while others may still be leaving its world

    def attach(self) -> None:
        """From the import of torch.distributed on; also in processes that multiprocessing starts."""
        for name in ("torch.distributed.distributed_c10d", "torch.distributed"):  # that of groups, and that of RPC
            when_imported(name, partial(self._replace, name))
        for start in ("SpawnProcess", "ForkServerProcess"):  # what is forked has all of this by itself
            Patches().replace_in("multiprocessing.context", start, "_Popen", self._starting)

    def _replace(self, name: str) -> None:
        Patches().replace(sys.modules[name], "rendezvous", around(self._meet))

    def _starting(self, old: Callable[[Any], Any]) -> Any:
        def start(process: Any) -> Any:
            if process._target is not None:
                process._target = partial(_run_in_own_world, self._given, process._target)
            return old(process)

        return staticmethod(start)

    def _meet(
        self, old: Callable[..., Iterator[Any]], /, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[Any]:
        is_first = "0" in (str(rank), os.environ.get("RANK") if rank < 0 else "")
        is_own = os.getpid() != self._pid and "RANK" in self._given  # else no launcher has given any
        if is_first and is_own and not self._before:
            sys.stderr.write(f"lockstep: processes that rank {self._given['RANK']} has started {_UNWATCHED}\n")
        port, agents = own_port(self._given, os.environ, {"init_method": url}), os.environ.get(_AGENTS, "")
        nth, is_file = self._before[url, port, world_size], url.startswith("file:")
        path, mark, query = url.partition("?")
        if is_file and nth:  # torch deletes that of the world before
            path += f".{nth}"
        if port and agents:
            os.environ[_AGENTS] = "False"
        try:
            store, rank, its_size = next(old(path + mark + query, rank, world_size, **kwargs))
        finally:
            if agents:
                os.environ[_AGENTS] = agents
        self._before[url, port, world_size] += 1
        if not is_file:
            self._held, store = store, _anew(store, nth)
        yield store, rank, its_size


def _run_in_own_world(given: Mapping[str, str], target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    Worlds(given).attach()
    target(*args, **kwargs)


def _anew(store: Any, nth: int) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(f"world {nth}", store) if nth else store
