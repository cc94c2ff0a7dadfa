"""What a rank looks at before it opens a socket of the job: names, ports, interfaces. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar, final

from lockstep.comm.place import Place

if sys.platform == "linux":
    import fcntl

T = TypeVar("T")

RESOLVE_S = 10.0  # a name server that is asked twice needs about this long to be given up
SILENCE_S = 10.0  # packets without any answer for this long: a wrong address or a firewall
NOTICE_S = 1.5  # after which it is said what is waited for
_CONNECT_S = 3.0
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_UNASKED_S = 0.05  # a meeting point never speaks first; who does so within this time is something else


class Deadline(Exception):
    """A call did not return in time; its thread was left behind."""


@final
class Aside(Generic[T]):
    """A call in a thread of its own: for C code that has no limit, and during which no signal is heard."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True, name="lockstep-aside")
        self._thread.start()

    def is_done(self, limit_s: float) -> bool:
        """True as soon as it has ended, False after `limit_s`."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What the call has returned or raised."""
        return self._future.result(0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(error)


def within(limit_s: float, call: Callable[[], T], slow: Callable[[], None] = lambda: None) -> T:
    """What `call` returns or raises, or Deadline after `limit_s`. `slow` is called where it takes long."""
    aside = Aside(call)
    if limit_s > NOTICE_S and not aside.is_done(NOTICE_S):
        slow()
        limit_s -= NOTICE_S
    if not aside.is_done(limit_s):
        raise Deadline
    return aside.result()


# ---------------------------------------------------------------------- the meeting point


def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of `host`, in the order in which to try them. Raises OSError or Deadline."""
    found = within(RESOLVE_S, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def addresses_of(host: str) -> list[str]:
    """As `resolve`; [] where the name leads nowhere."""
    try:
        return resolve(host, 0)
    except (OSError, UnicodeError, Deadline):
        return []


def unresolved(place: Place, error: Exception) -> str:
    """The sentence for a host name that leads nowhere."""
    why = f"no answer in {RESOLVE_S:g} s" if isinstance(error, Deadline) else getattr(error, "strerror", str(error))
    return f"{place.source('address')}: host {place.address!r} cannot be found from {socket.gethostname()} ({why})"


class Listening(NamedTuple):
    """A port that this process holds, or why it does not."""

    listener: socket.socket | None
    taken: bool = False
    problem: str = ""


def listen(place: Place, addresses: Sequence[str], everywhere: bool) -> Listening:
    """Hold the port of the meeting point, at the address the others were given and nowhere else.

    everywhere: listen at every address of this machine, because the others know it by another one.
    """
    wanted = ["0.0.0.0"] if everywhere else sorted(addresses, key=lambda address: ":" in address)
    reason = OSError(errno.EADDRNOTAVAIL, "no address")
    for address in wanted:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return Listening(socket.create_server((address, place.port), family=family, backlog=4096))
        except OSError as error:  # also where there is no IPv6
            reason = error
        if reason.errno == errno.EADDRINUSE:
            return Listening(None, taken=True)
    here = f"rank 0 must open port {place.port}, but on {socket.gethostname()}"
    if reason.errno == errno.EADDRNOTAVAIL:
        why = f"{here} {place.source('address')}={place.address} ({', '.join(addresses)}) is no address of this machine"
        return Listening(None, problem=f"{why}: name rank 0's machine, or start rank 0 there")
    return Listening(None, problem=f"{here} that fails: {reason.strerror}")


def keep_port() -> socket.socket:
    """A free port of all addresses, held but not listened at: who binds it by number with SO_REUSEADDR may do that.

    As all do that listen for others: torch's stores, Python's servers, `lockstep.init`.
    """
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    kept = socket.socket(family, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    kept.bind((anywhere, 0))
    return kept


class Knock(NamedTuple):
    """What one attempt to connect found."""

    result: Literal["open", "refused", "silent", "stranger", "unreachable"]
    address: str = ""
    detail: str = ""


def knock(addresses: Sequence[str], port: int, limit_s: float = _CONNECT_S) -> Knock:
    """Connect once and hang up. A listener that speaks first or hangs up at once is a stranger."""
    worst = Knock("unreachable", detail="no address")
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=limit_s) as connection:
                if not select.select([connection], [], [], _UNASKED_S)[0]:
                    return Knock("open", address)
                said = b""
                with contextlib.suppress(OSError):  # a reset is a way of hanging up
                    said = connection.recv(40)
                return Knock("stranger", address, f"it says {said!r}" if said else "it hangs up")
        except TimeoutError:
            worst = Knock("silent", address)
        except ConnectionRefusedError:
            return Knock("refused", address)
        except OSError as error:
            worst = Knock("unreachable", address, str(error.strerror))
    return worst


def await_listener(
    place: Place, addresses: Sequence[str], limit_s: float, say: Callable[[str], None], part: str = "rank"
) -> Knock:
    """Knock until somebody listens, for at most `limit_s`: rank 0 may still be starting. Gives up early on silence.

    part: what has the number `place.rank`, a "rank" or a "machine".
    """
    start = time.monotonic()
    answered = start  # when a packet last came back
    said = False
    pause_s = 0.02
    while True:
        left_s = limit_s - (time.monotonic() - start)
        found = knock(addresses, place.port, min(_CONNECT_S, max(left_s, 0.1)))
        now = time.monotonic()
        if found.result in ("open", "stranger") or now - start >= limit_s:
            return found
        if found.result == "refused":
            answered = now
        elif now - answered >= SILENCE_S:
            return found
        if now - start > NOTICE_S and not said:
            said = True
            awaited = f"{part} 0 at {place.meeting_point} (up to {limit_s:g} s)"
            say(f"{part} {place.rank} waits for {awaited}: {_reason(found)}")
        time.sleep(min(pause_s, max(limit_s - (now - start), 0.0)))
        pause_s = min(pause_s * 1.5, 0.5)


def unmet(place: Place, found: Knock, waited_s: float, part: str = "rank") -> str:
    """The sentence for a meeting point at which this job's rank 0 is not."""
    if found.result == "stranger":
        return f"port {place.port} of {place.address} ({found.address}) answers, but is not this job: {found.detail}"
    text = f"{part} 0 is not at {place.meeting_point}: {_reason(found)} for {waited_s:.0f} s"
    if found.result == "refused":
        opens = f"{part.capitalize()} 0 opens this port"
        return f"{text}. {opens}: it was not started, ended, or was given another address or port"
    return f"{text}. The address is wrong, the machine is down, or a firewall drops the packets"


def _reason(found: Knock) -> str:
    if found.result == "refused":
        return f"{found.address} refuses connections on the port"
    return f"{found.address} does not answer" if found.result == "silent" else f"{found.address} {found.detail}"


# ---------------------------------------------------------------------- this machine


def machine_id() -> str:
    """Equal for processes that share a kernel, its network and its /dev/shm, of which each container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory = os.stat("/dev/shm").st_dev if os.path.exists("/dev/shm") else 0
        return f"{boot}/{os.readlink('/proc/self/ns/net')}/{memory}"
    except OSError:  # not Linux
        return socket.gethostname()


def loopback_interface() -> str:
    """The name of the interface that never leaves the machine; "" where it has an unusual one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


def is_loopback(address: str) -> bool:
    """True for an address that means this machine on every machine."""
    return address.startswith("127.") or address == "::1"


def local_address(towards: str) -> str:
    """The address from which this machine talks to `towards`; "" where there is no way. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:  # also where there is no IPv6
        return ""


def leads_here(addresses: Sequence[str]) -> bool:
    """True where one of them belongs to this machine."""
    return any(is_loopback(address) or local_address(address) == address for address in addresses)


class Interface(NamedTuple):
    """A way out of this machine."""

    name: str
    address: str  # IPv4


def interfaces() -> list[Interface]:
    """Those that have an IPv4 address, in the system's order; [] where it cannot be asked."""
    found: list[Interface] = []
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an IPv4 address
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def interface_of(address: str) -> str:
    """The interface that has this IPv4 address; "" where none has, or where the system cannot be asked."""
    return next((name for name, own in interfaces() if own == address), "")


def gloo_interface(towards: Sequence[str], one_machine: bool) -> str:
    """The interface to give to gloo, which would take the one this machine's name leads to; "" where that is right.

    towards: addresses of other ranks, the likeliest first.
    """
    if one_machine:
        return loopback_interface()  # nothing needs to listen beyond this machine
    remote = next((address for address in towards if address and not is_loopback(address)), "")
    own = addresses_of(socket.gethostname()) if remote else []
    return interface_of(local_address(remote)) if remote and all(map(is_loopback, own)) else ""
