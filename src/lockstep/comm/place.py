"""Which rank this process is, and where the ranks meet: read from arguments and the environment, nothing else.

Pure: `read_place` looks at its arguments only, and finds every problem before it gives up. `init.py` does the I/O.

    explicit arguments  >  torchrun's variables  >  Slurm's variables  >  one process

Each field goes down this list by itself. `LOCKSTEP_ENV=off` skips the two in the middle.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.comm.launcher_variables import Launcher, find_variables
from lockstep.errors import EnvironmentProblems

SWITCH = "LOCKSTEP_ENV"
HINT = (
    "Start the processes with `torchrun --standalone --nproc-per-node=2 train.py` or, under Slurm, "
    "`srun python train.py`. LOCKSTEP_ENV=off runs one process whatever the environment says."
)


class Problem(NamedTuple):
    """One thing that cannot be: `field` is the field of Place that it spoils ("" where none)."""

    field: str
    text: str


@dataclass(frozen=True)
class Place:
    """One process's place among the ranks of a job."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this machine
    local_world_size: int
    node_rank: int  # number of this machine
    address: str  # where the ranks meet; "" where they meet in a file or there is only one
    port: int
    file: str
    launcher: Launcher
    sources: tuple[tuple[str, str], ...]  # field -> the argument or variable that said so
    run_id: str = ""  # equal for all ranks of one launch; "" where the launcher gives none
    restart_count: int = 0
    agent_store: bool = False  # torchrun's agent hosts the meeting point, no rank does
    note: str = ""  # what the user may not expect, in one clause

    @property
    def hosts_store(self) -> bool:
        """True where this process opens the port at which the others meet."""
        return self.world_size > 1 and self.rank == 0 and not self.file and not self.agent_store

    @property
    def meeting_point(self) -> str:
        """Where the ranks meet, as a person writes it."""
        if self.world_size == 1:
            return "nowhere"
        if self.file:
            return self.file
        if not self.address:
            return "the store of init_process_group"
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def source(self, field: str) -> str:
        """What gave `field` its value: "RANK", "init(rank=...)", "default", ..."""
        return dict(self.sources).get(field, "default")

    def describe(self) -> str:
        """What was found and what said so, in one line."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        by = ", ".join(dict.fromkeys(self.source(field) for field in ("rank", "world_size")))
        text = f"{ranks} ({self.launcher if by == 'default' else f'{self.launcher}: {by}'})"
        if self.restart_count:
            text += f", restart {self.restart_count}"
        return f"{text}; {self.note}" if self.note else text


def read_place(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    port: int | None = None,
    file: str | None = None,
) -> tuple[Place, tuple[Problem, ...]]:
    """This process's place, and everything that is wrong with it; a field that a problem names means nothing.

    Explicit arguments win over `environ`, field by field.
    """
    reader = _Reader(environ, explicit=rank is not None or world_size is not None)
    variables = reader.variables
    one = 1 if variables.launcher == "one process" else None
    size = reader.number("world_size", world_size, variables.world_size, default=one, minimum=1)
    alone = size == 1
    here = reader.number("rank", rank, variables.rank, default=0 if alone else None, minimum=0)
    if here is not None and size is not None and here >= size:
        worlds = reader.named("world_size", size)
        reader.problem("rank", f"{reader.named('rank', here)}, but {worlds}: ranks are 0 to {size - 1}")
    host, at = "", 0
    if file is not None:
        reader.sources["file"] = "init(file=...)"
        if address is not None or port is not None:
            reader.problem("file", "init() got a file and an address or port: the ranks can meet at one of them")
    elif not alone:
        host, at = reader.meeting_point(address, port)
    local = reader.local(here, size)
    place = Place(
        rank=here or 0,
        world_size=size or 1,
        local_rank=local[0],
        local_world_size=local[1],
        node_rank=local[2],
        address=host,
        port=at,
        file=file or "",
        launcher=variables.launcher,
        sources=tuple(sorted(reader.sources.items())),
        run_id=variables.run_id,
        restart_count=reader.number("restart_count", None, variables.restart_count, default=0, minimum=0) or 0,
        agent_store=reader.agent_store(),
        note=variables.note,
    )
    return place, tuple(reader.problems)


def find_place(environ: Mapping[str, str], **given: Any) -> Place:
    """`read_place` for who wants a place or nothing. Raises EnvironmentProblems with all that is wrong."""
    place, problems = read_place(environ, **given)
    if problems:
        raise EnvironmentProblems([problem.text for problem in problems], HINT)
    return place


def place_on_machines(place: Place, machines: Sequence[str]) -> Place:
    """`place` with its local fields filled in from the machine of every rank, where no launcher has named them."""
    mine = machines[place.rank]
    same = [rank for rank, machine in enumerate(machines) if machine == mine]
    order = list(dict.fromkeys(machines))
    given = dict(place.sources)
    return replace(
        place,
        local_rank=place.local_rank if "local_rank" in given else same.index(place.rank),
        local_world_size=place.local_world_size if "local_world_size" in given else len(same),
        node_rank=place.node_rank if "node_rank" in given else order.index(mine),
    )


# ---------------------------------------------------------------------- one field after the other


class _Reader:
    """Reads fields, remembers where each came from, and collects what is wrong."""

    def __init__(self, environ: Mapping[str, str], explicit: bool) -> None:
        self.environ = {name: value for name, value in environ.items() if value != ""}
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        switch = self.environ.get(SWITCH, "auto").lower()
        if switch not in ("auto", "off"):
            self.problem("", f"{SWITCH}={switch!r}: it can be off (use arguments only) or auto")
        if switch == "off":
            self.environ = {}
        self.variables = find_variables(self.environ, explicit, self.problem)

    def problem(self, field: str, text: str) -> None:
        self.problems.append(Problem(field, text))

    def named(self, field: str, value: object) -> str:
        """`RANK=3`, or `rank=3` where it was an argument."""
        source = self.sources.get(field, field)
        return f"{field}={value}" if source.startswith("init(") or source == field else f"{source}={value}"

    def number(
        self, field: str, explicit: int | None, names: Sequence[str], *, default: int | None, minimum: int
    ) -> int | None:
        """The field as a number of at least `minimum`; None and a problem where it cannot be."""
        name = next((n for n in names if n in self.environ), "")
        value = default
        if explicit is not None:
            self.sources[field] = f"init({field}=...)"
            value = explicit
            if isinstance(explicit, bool) or not isinstance(explicit, int):
                self.problem(field, f"{field}={explicit!r} is not a whole number")
                return None
        elif name:
            self.sources[field] = name
            try:
                value = int(self.environ[name])
            except ValueError:
                self.problem(field, f"{name}={self.environ[name]!r} is not a whole number")
                return None
        elif default is None:
            self.problem(field, f"{names[0]} is not set" if names else f"init({field}=...) is needed too")
            return None
        if value is not None and value < minimum:
            self.problem(field, f"{self.named(field, value)} is less than {minimum}")
            return None
        return value

    def meeting_point(self, address: str | None, port: int | None) -> tuple[str, int]:
        implied = self.variables
        host = self.environ.get("MASTER_ADDR", implied.address) if address is None else address
        if address is not None:
            self.sources["address"] = "init(address=...)"
        elif host:
            is_set = "MASTER_ADDR" in self.environ
            self.sources["address"] = "MASTER_ADDR" if is_set else "the first host of the Slurm step"
        if not host:
            self._missing("address", "MASTER_ADDR")
        elif not _is_host(host):
            self.problem("address", f"{self.named('address', repr(host))} is not a host name or an IP address alone")
        if port is None and "MASTER_PORT" not in self.environ:
            if implied.port:
                self.sources["port"] = "the Slurm job and step id"
            else:
                self._missing("port", "MASTER_PORT")
            return host, implied.port
        at = self.number("port", port, ("MASTER_PORT",), default=0, minimum=1)
        if at is not None and at > 65535:
            self.problem("port", f"{self.named('port', at)} is no port: they end at 65535")
        return host, at or 0

    def _missing(self, field: str, name: str) -> None:
        by_arguments = self.variables.launcher == "arguments"
        if all(problem.field != field for problem in self.problems):
            self.problem(field, f"init({field}=...) or {name} is needed" if by_arguments else f"{name} is not set")

    def agent_store(self) -> bool:
        """True where the meeting point is the one that torchrun names, and its agent keeps it open."""
        where = (self.sources.get("address"), self.sources.get("port"))
        return where == ("MASTER_ADDR", "MASTER_PORT") and self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def local(self, rank: int | None, size: int | None) -> tuple[int, int, int]:
        """(local_rank, local_world_size, node_rank): the launcher's, unless arguments have moved this process."""
        variables = self.variables
        names = (variables.rank, variables.world_size)
        own = tuple(next((self.environ[n] for n in each if n in self.environ), None) for each in names)
        if rank is None or size is None or own != (str(rank), str(size)):
            return 0, 1, 0
        local_rank = self.number("local_rank", None, variables.local_rank, default=0, minimum=0)
        node = self.number("node_rank", None, variables.node_rank, default=0, minimum=0)
        count = self.number("local_world_size", None, variables.local_world_size, default=1, minimum=1)
        tasks = variables.tasks_per_node
        if tasks and node is not None and node < len(tasks):
            self.sources["local_world_size"] = "the tasks per node of the Slurm step"
            count = tasks[node]
        if local_rank is None or count is None or "local_world_size" not in self.sources:
            return local_rank or 0, count or 1, node or 0
        here, nodes = self.named("local_world_size", count), self.environ.get("GROUP_WORLD_SIZE", "1")
        may_differ = bool(tasks) or (nodes.isdecimal() and int(nodes) > 1)  # between machines
        if local_rank >= count:
            self.problem("local_rank", f"{self.named('local_rank', local_rank)}, but {here}")
        elif count > size or (size % count and not may_differ):
            self.problem("local_world_size", f"{self.named('world_size', size)} is no multiple of {here}")
        return local_rank, count, node or 0


def _is_host(text: str) -> bool:
    """A name or an address: no port, no scheme, no blanks. Whether it exists is another question."""
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", text) is not None
    return True
