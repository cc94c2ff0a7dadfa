"""Machines find each other before torch's rendezvous begins, which waits without a word for what cannot come.

Each launcher leaves a record of itself in the store at the meeting point and reads those of the others: what they
contradict each other in is said on all of them, and who is still missing on those that wait.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypedDict, final

from lockstep.comm import preflight
from lockstep.comm.place import Place
from lockstep.errors import LaunchError
from lockstep.launch.channel import Channel
from lockstep.launch.doctor.asked import meeting_place
from lockstep.launch.doctor.probes import owners

_PREFIX = "lockstep/run"
_SIGN_S = 3.0  # who holds the store signs it at once
_LINGER_S = 1.0  # who holds the store lets the others read
_SHOWN = 8  # machines named in one sentence


class Machine(TypedDict):
    """What a launcher says about itself."""

    run: str  # --rdzv-id
    nnodes: str
    node_rank: int | None  # None: machines get their numbers when they have met
    processes: int
    host: str
    pid: int


def who(machine: Machine) -> str:
    """`machine 1 on host (pid 7)`, `host (pid 7)`"""
    number = "" if machine["node_rank"] is None else f"machine {machine['node_rank']} on "
    return f"{number}{machine['host']} (pid {machine['pid']})"


@final
class Meeting:
    """The launchers at one meeting point, those of this run among them, until they have begun.

    least, most: machines that the run takes. limit_s: how long torch's rendezvous will wait.
    """

    def __init__(
        self, channel: Channel, mine: Machine, least: int, most: int, limit_s: float, say: Callable[[str], None]
    ) -> None:
        """Raises: LaunchError, where another machine contradicts this one: those that still wait are told too."""
        self.channel, self._mine, self._least, self._most = channel, mine, least, most
        self._limit_s, self._say = limit_s, say
        self.where, self._since_s = f"{channel.address}:{channel.port}", time.monotonic()
        self._has_said = self._has_begun = False
        channel.append("machine", mine)
        here = self._here()
        problem = self._contradiction(here)
        if problem:
            if channel.missing([self._key("begun")], 0):
                channel.put(self._key("problem"), problem)
                time.sleep(_LINGER_S * channel.is_holder)
            raise LaunchError(problem)
        unlike = next((one for one in here if one["processes"] != mine["processes"]), None)
        if unlike is not None:
            here, there = mine["processes"], unlike["processes"]
            say(f"--nproc-per-node is {here} here and {there} on {who(unlike)}: is it meant?")

    @property
    def store(self) -> Any:
        """Where the machines of this run, and of no other, tell each other something."""
        return self.channel.corner(self._mine["run"])

    def begins(self) -> None:
        """All have met."""
        if not self._has_begun:
            self._has_begun = True
            self.channel.put(self._key("begun"), 1)

    def problem(self) -> str:
        """What another machine has found to be wrong, "" for nothing. Says once who is missing, where that lasts."""
        if self._has_begun:
            return ""
        if not self.channel.missing([self._key("problem")], 0):
            return self.channel.read(self._key("problem"))
        if time.monotonic() - self._since_s > preflight.NOTICE_S and not self._has_said:
            self._has_said = True
            self._say(self._notice())
        return ""

    def late(self) -> str:
        """The sentence for machines that never came, or that have come and do not begin."""
        here = self._here()
        if not self._has_begun and (problem := self._contradiction(here)):  # torch's rendezvous has failed by it
            return problem
        missing = "" if self._has_begun else self._missing(here)
        if missing:
            why = "it was not started, has ended, or was given another address or port"
            never = f"{missing} never came to {self.where} in {self._limit_s:g} s; came: {self._named(here)}"
            return f"{never}. Look at its output: {why}"
        why = "Its launcher has ended or stands still, or the network is cut"
        return f"a machine has come to {self.where} and is not heard any more: one of {self._named(here)}. {why}"

    @property
    def ended(self) -> str:
        """The sentence for a store that was there, and does not answer any more."""
        return f"nobody answers at {self.where} any more: the machine that held it has ended, and the run with it"

    def _contradiction(self, here: Sequence[Machine]) -> str:
        """Between this machine and another, in the same words on both."""
        pairs = ((one, other) for number, one in enumerate(here) for other in here[:number])
        own = (contradiction(*pair, self.where, self._most) for pair in pairs if self._mine in pair)
        return next(filter(None, own), "")

    def _notice(self) -> str:
        here = self._here()
        missing, named = self._missing(here), self._named(here)
        if missing:
            only = ", which no other machine can reach" if preflight.is_loopback(self.channel.address) else ""
            same = "the same command" + ("" if self._mine["node_rank"] is None else " with its own --node-rank")
            limit = f"up to {self._limit_s:g} s"
            return f"waiting for {missing} at {self.where}{only}, {limit}: {same} starts it; here: {named}"
        if len(here) < self._most:
            return f"{len(here)} of {self._most} machines are at {self.where}, more may come for a while: {named}"
        awaited = f"all {self._most} machines (--nnodes) to begin, or a place among them"
        return f"waiting for {awaited}, at {self.where}; here: {named}"

    def _missing(self, here: Sequence[Machine]) -> str:
        if self._mine["node_rank"] is None:
            count = self._least - len(here)
            return f"{count} more machine{'s' * (count > 1)}" if count > 0 else ""
        numbers = {machine["node_rank"] for machine in here}
        absent = [str(number) for number in range(self._most) if number not in numbers]
        return f"machine{'s' * (len(absent) > 1)} {', '.join(absent[:_SHOWN])}" if absent else ""

    def _named(self, here: Sequence[Machine]) -> str:
        """Those of this run, and one that has probably been told another name for it."""
        named = ", ".join(map(who, here[:_SHOWN]))
        stranger = next((one for one in self._all() if one["run"] != self._mine["run"]), None)
        if stranger is None:
            return named
        return f"{named}; and {who(stranger)}, but with --rdzv-id {stranger['run']!r}, not {self._mine['run']!r}"

    def _here(self) -> list[Machine]:
        return [machine for machine in self._all() if machine["run"] == self._mine["run"]]

    def _all(self) -> list[Machine]:
        return self.channel.read_all("machine", self.channel.add("machines", 0))

    def _key(self, name: str) -> str:
        return f"{name}/{self._mine['run']}"


def contradiction(mine: Machine, other: Machine, where: str, most: int) -> str:
    """Why this machine and one that came before it cannot be one run; "" where they can."""
    if (other["node_rank"] is None) != (mine["node_rank"] is None):
        return f"{who(other)} and {who(mine)} have different --rdzv-backend: give all machines the same"
    if other["nnodes"] != mine["nnodes"]:
        sizes = f"{who(other)} was started with {other['nnodes']}, {who(mine)} with {mine['nnodes']}"
        return f"machines disagree on --nnodes at {where}: {sizes}. Give all the same"
    if mine["node_rank"] is not None and other["node_rank"] == mine["node_rank"]:
        twice = f"{other['host']} (pid {other['pid']}) and {mine['host']} (pid {mine['pid']})"
        each = f"Give each machine its own, 0 to {most - 1}, and each run its own port"
        return f"--node-rank {mine['node_rank']} was given twice at {where}: to {twice}. {each}"
    return ""


# ---------------------------------------------------------------------- the way to the meeting point


def find_channel(
    host: str, port: int, mine: Machine, is_host: bool | None, limit_s: float, say: Callable[[str], None]
) -> Channel:
    """The store at the meeting point: opened here, or joined. is_host: None where the address shall tell.

    Blocks up to `limit_s`, and says so. Raises: LaunchError, with what stands in the way.
    """
    number, flag = mine["node_rank"], "--rdzv-endpoint" if mine["node_rank"] is None else "--master-addr"
    number = int(not is_host) if number is None else number
    place = meeting_place(number, max(2, number + 1), host, port, flag)
    try:
        addresses = preflight.resolve(host, port)
    except (OSError, UnicodeError, preflight.Deadline) as error:
        raise LaunchError(preflight.unresolved(place, error)) from error
    is_local = preflight.leads_here(addresses)
    if is_local if is_host is None else is_host:
        foreign = f"this machine shall open {place.meeting_point}, but {host} ({addresses[0]}) is no address of it"
        try:
            channel = Channel.host(host, port, _PREFIX, mine, lambda: say(foreign))
        except LaunchError as error:
            raise LaunchError(f"{error}: {foreign}. Correct {flag}" if not is_local else str(error)) from error
        if channel is not None:
            return channel
        if is_host:
            return _holder(place, addresses[0], mine)
    start_s = time.monotonic()
    found = preflight.await_listener(place, addresses, limit_s, say, "machine")
    if found.result != "open":
        raise LaunchError(preflight.unmet(place, found, time.monotonic() - start_s, "machine"))
    channel = _join(place, found.address, limit_s, say)
    return _known(channel, channel.sign(_SIGN_S), mine, say)


def _join(place: Place, address: str, limit_s: float, say: Callable[[str], None]) -> Channel:
    answers = f"{place.meeting_point} answers, but"
    try:
        slow = f"{answers} no torch store replies: another program?"
        return Channel.join(address, place.port, _PREFIX, limit_s, is_ours=True, slow=lambda: say(slow))
    except LaunchError as error:
        raise LaunchError(f"{answers} is not this run: {error}. Choose another port on every machine") from error


def _known(channel: Channel, sign: Machine | None, mine: Machine, say: Callable[[str], None]) -> Channel:
    """`channel`, where it may be this run's, as its `sign` says. Raises: LaunchError."""
    where = f"{channel.address}:{channel.port}"
    if sign is None:
        text = f"{where} is a torch store that no `lockstep run` holds: start it so on all machines, or change the port"
        if mine["node_rank"] is not None:
            raise LaunchError(text)
        say(text)  # one that is there for many runs will do
    elif mine["node_rank"] is not None and sign["run"] != mine["run"]:
        channel.append("machine", mine)  # who waits there is told
        theirs = f"run {sign['run']!r} of {sign['host']} (pid {sign['pid']}); this is run {mine['run']!r}"
        same = "Give all machines of a run the same --rdzv-id, and each run its own port"
        raise LaunchError(f"{where} belongs to {theirs}. {same}")
    else:
        channel.missing(["machine/0"], _SIGN_S)  # that of who holds it, to compare this one with
    return channel


def _holder(place: Place, address: str, mine: Machine) -> Channel:
    """The channel of who has the port that this machine shall open. Raises: LaunchError, where it is not this run's."""
    channel, sign = None, None
    with suppress(LaunchError):  # it is no store
        channel = Channel.join(address, place.port, _PREFIX, preflight.NOTICE_S, is_ours=True)
        sign = channel.sign(_SIGN_S)
    if channel is not None and sign is not None:
        return _known(channel, sign, mine, lambda text: None)
    taken = f"port {place.port} of {socket.gethostname()} is taken by"
    held = ", ".join(owners(place.port)) or "a process that this user may not see"
    raise LaunchError(f"{taken} {held}, so machine 0 cannot open it: end that, or choose another port on every machine")
