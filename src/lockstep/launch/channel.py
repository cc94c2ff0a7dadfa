"""Where machines and ranks leave what others shall know: JSON values in a torch store."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

from torch.distributed import DistError, PrefixStore, TCPStore

from lockstep.comm import preflight
from lockstep.errors import LaunchError

T = TypeVar("T")
Slow = Callable[[], None]

LOST_BY = LaunchError, DistError  # what is raised of a store once the process that holds it has gone
_GREETING_S = 10.0  # a store answers in milliseconds, one on a machine that is out of memory in seconds
_ANSWER = timedelta(seconds=60)
_SIGN = "sign"


@final
class Channel:
    """JSON values under keys, seen by all. Only `read` blocks, and not for ever.

    Raises: LaunchError, from every method, where the process that holds the store has gone.
    """

    def __init__(self, store: Any, prefix: str, address: str = "", port: int = 0, *, is_holder: bool = False) -> None:
        self._store = PrefixStore(prefix, store)
        self.address, self.port, self.prefix, self.is_holder = address, port, prefix, is_holder

    @classmethod
    def on_loopback(cls) -> Channel:
        """One that only processes of this machine can reach."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, None, True, _ANSWER, False, master_listen_fd=listener.detach())
        return cls(store, "doctor", "127.0.0.1", port, is_holder=True)

    @classmethod
    def host(cls, address: str, port: int, prefix: str, sign: Any = 1, slow: Slow = lambda: None) -> Channel | None:
        """One at the meeting point, in the store that torch's rendezvous will then use too; None: the port is taken.

        sign: whose it is, for those that join. slow: called where nothing comes back from `address`.
        Raises: LaunchError.
        """
        try:
            store = preflight.within(
                _GREETING_S, lambda: TCPStore(address, port, None, True, _ANSWER, False, multi_tenant=True), slow
            )
        except preflight.Deadline as error:
            raise LaunchError(f"nothing comes back from {address}:{port} in {_GREETING_S:g} s") from error
        except DistError as error:
            if "EADDRINUSE" in str(error):
                return None
            raise LaunchError(f"port {port} cannot be opened: {str(error).splitlines()[0]}") from error
        made = cls(store, prefix, address, port, is_holder=True)
        made.put(_SIGN, sign)
        return made

    @classmethod
    def join(
        cls, address: str, port: int, prefix: str, limit_s: float, is_ours: bool = False, slow: Slow = lambda: None
    ) -> Channel:
        """One that another process holds. is_ours: no need to see whose it is. slow: called where no store replies.

        Raises: LaunchError, where it is none after `limit_s` or somewhat later.
        """
        limit_s = min(limit_s, _GREETING_S)
        try:
            store = preflight.within(limit_s, lambda: TCPStore(address, port, None, False, _ANSWER, False), slow)
        except preflight.Deadline as error:
            raise LaunchError(f"no torch store replied in {limit_s:g} s") from error
        except DistError as error:
            raise LaunchError(str(error).splitlines()[0]) from error
        made = cls(store, prefix, address, port)
        if not is_ours and made.missing([_SIGN], limit_s):
            raise LaunchError("a torch store of another program, without a `lockstep doctor`")
        return made

    @property
    def store(self) -> Any:
        """Torch's own, in which this is a corner."""
        return self._store.underlying_store

    def corner(self, prefix: str) -> Any:
        """Of that store, another one."""
        return PrefixStore(prefix, self.store)

    def sign(self, limit_s: float) -> Any:
        """Whose it is; None where nobody has said so after `limit_s`."""
        return None if self.missing([_SIGN], limit_s) else self.read(_SIGN)

    def put(self, key: str, value: Any) -> None:
        """Write."""
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """What is there; waits up to a minute for it."""
        return json.loads(self._ask(lambda: self._store.get(key)))

    def add(self, key: str, amount: int = 1) -> int:
        """Count; how many there are now."""
        return self._ask(lambda: self._store.add(key, amount))

    def append(self, kind: str, value: Any) -> None:
        """Write one more of a `kind`, to be read by `read_all`; `add` counts them under `<kind>s`."""
        self.put(f"{kind}/{self.add(f'{kind}s') - 1}", value)

    def missing(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Those of `keys` without a value; [] as soon as all have one."""
        deadline = time.monotonic() + limit_s
        while True:
            left = [key for key in keys if not self._ask(lambda key=key: self._store.check([key]))]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.02)

    def read_all(self, kind: str, count: int) -> list[Any]:
        """The values of `kind/0` ... `kind/<count - 1>` that are there."""
        keys = [f"{kind}/{number}" for number in range(count)]
        return [self.read(key) for key in keys if not self.missing([key], 0)]

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DistError as error:
            where = f"at {self.address}:{self.port}" if self.address else "where the machines meet"
            raise LaunchError(f"no answer from the store {where}: {str(error).splitlines()[0]}") from error
