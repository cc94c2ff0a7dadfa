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
from typing import Any, Literal, NamedTuple

from lockstep.comm.slurm_lists import expand_hosts, expand_tasks, slurm_port
from lockstep.errors import EnvironmentProblems

Launcher = Literal["arguments", "torchrun", "environment", "slurm", "one process", "process group"]

HINT = (
    "Start the processes with `torchrun --standalone --nproc-per-node=2 train.py` or, under Slurm, "
    "`srun python train.py`. LOCKSTEP_ENV=off runs one process whatever the environment says."
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


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
    reader = _Reader(environ)
    variables = reader.launcher_variables(explicit=rank is not None or world_size is not None)
    one = 1 if reader.launcher == "one process" else None
    size = reader.number("world_size", world_size, variables.world_size, default=one, minimum=1)
    alone = size == 1
    here = reader.number("rank", rank, variables.rank, default=0 if alone else None, minimum=0)
    if here is not None and size is not None and here >= size:
        reader.problem(
            "rank", f"{reader.named('rank', here)}, but {reader.named('world_size', size)}: ranks are 0 to {size - 1}"
        )
    host, at = "", 0
    if file is not None:
        reader.sources["file"] = "init(file=...)"
        if address is not None or port is not None:
            reader.problem("file", "init() got a file and an address or port: the ranks can meet at one of them")
    elif not alone:
        host, at = reader.meeting_point(address, port, variables)
    local = reader.local(here, size, variables)
    place = Place(
        rank=here or 0,
        world_size=size or 1,
        local_rank=local[0],
        local_world_size=local[1],
        node_rank=local[2],
        address=host,
        port=at,
        file=file or "",
        launcher=reader.launcher,
        sources=tuple(sorted(reader.sources.items())),
        run_id=variables.run_id,
        restart_count=reader.number("restart_count", None, variables.restart_count, default=0, minimum=0) or 0,
        agent_store=reader.agent_store(),
        note=reader.note,
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


# ---------------------------------------------------------------------- the environment, one launcher at a time


class _Variables(NamedTuple):
    """The names under which a launcher gives each field, and the values it gives in another form."""

    rank: tuple[str, ...] = ()
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    restart_count: tuple[str, ...] = ()
    run_id: str = ""
    address: str = ""  # what the launcher implies, where MASTER_ADDR and MASTER_PORT are not set
    port: int = 0
    tasks_per_node: tuple[int, ...] = ()


class _Reader:
    """Reads fields, remembers where each came from, and collects what is wrong."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = {name: value for name, value in environ.items() if value != ""}
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        self.launcher: Launcher = "one process"
        self.note = ""

    def problem(self, field: str, text: str) -> None:
        self.problems.append(Problem(field, text))

    def named(self, field: str, value: object) -> str:
        """`RANK=3`, or `rank=3` where it was an argument."""
        source = self.sources.get(field, field)
        return f"{field}={value}" if source.startswith("init(") or source == field else f"{source}={value}"

    def launcher_variables(self, explicit: bool) -> _Variables:
        switch = self.environ.get("LOCKSTEP_ENV", "auto").lower()
        if switch not in ("auto", "off"):
            self.problem("", f"LOCKSTEP_ENV={switch!r}: it can be off (use arguments only) or auto")
        if explicit:
            self.launcher = "arguments"
        if switch == "off":
            self.environ = {}
            return _Variables()
        if any(name in self.environ for name in _TORCHRUN):
            elastic = "TORCHELASTIC_RUN_ID" in self.environ
            self.launcher = "arguments" if explicit else "torchrun" if elastic else "environment"
            return _Variables(
                ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK"),
                ("TORCHELASTIC_RESTART_COUNT",), self.environ.get("TORCHELASTIC_RUN_ID", ""),
            )  # fmt: skip
        return self._slurm(explicit)

    def _slurm(self, explicit: bool) -> _Variables:
        """Slurm's variables inside a step of several tasks; an `sbatch` script or an `salloc` shell is one process."""
        environ = self.environ
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
        if not ("SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ) or tasks == "1":
            if environ.get("SLURM_NTASKS", "1") != "1" and not explicit:
                self.note = (
                    f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but this process is no task of a step: srun starts all"
                )
            elif "MASTER_ADDR" in environ and not explicit:
                self.note = "MASTER_ADDR is set, but neither RANK nor WORLD_SIZE"
            return _Variables()
        self.launcher = "arguments" if explicit else "slurm"
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        job, step = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "")), environ["SLURM_STEP_ID"]
        if not job.isdigit() or not step.isdigit():
            self.problem("port", f"SLURM_JOB_ID={job!r} and SLURM_STEP_ID={step!r} are not both numbers")
        return _Variables(
            ("SLURM_PROCID",), (size,), ("SLURM_LOCALID",), (), ("SLURM_NODEID",), ("SLURM_RESTART_COUNT",),
            run_id=f"slurm-{job}.{step}",
            address=self._slurm_address(),
            port=slurm_port(int(job), int(step)) if job.isdigit() and step.isdigit() else 0,
            tasks_per_node=self._slurm_tasks(),
        )  # fmt: skip

    def _slurm_address(self) -> str:
        environ = self.environ
        name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in environ), "")
        if "MASTER_ADDR" in environ or not name:
            return ""
        try:
            hosts = expand_hosts(environ[name])
        except ValueError as error:
            self.problem("address", f"{name}={environ[name]!r} is no list of hosts: {error}")
            return ""
        return "127.0.0.1" if len(hosts) == 1 else hosts[0]

    def _slurm_tasks(self) -> tuple[int, ...]:
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        name = next((n for n in names if n in self.environ), "")
        try:
            return tuple(expand_tasks(self.environ[name])) if name else ()
        except ValueError:
            self.problem("local_world_size", f"{name}={self.environ[name]!r} is no list of task counts like 2(x3),1")
            return ()

    # ------------------------------------------------------------------ single fields

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

    def meeting_point(self, address: str | None, port: int | None, variables: _Variables) -> tuple[str, int]:
        host = self.environ.get("MASTER_ADDR", variables.address) if address is None else address
        if address is not None:
            self.sources["address"] = "init(address=...)"
        elif host:
            self.sources["address"] = (
                "MASTER_ADDR" if "MASTER_ADDR" in self.environ else "the first host of the Slurm step"
            )
        if not host:
            self._missing("address", "MASTER_ADDR")
        elif not _is_host(host):
            self.problem("address", f"{self.named('address', repr(host))} is not a host name or an IP address alone")
        if variables.port and port is None and "MASTER_PORT" not in self.environ:
            self.sources["port"] = "the Slurm job and step id"
            return host, variables.port
        if port is None and "MASTER_PORT" not in self.environ:
            self._missing("port", "MASTER_PORT")
            return host, 0
        at = self.number("port", port, ("MASTER_PORT",), default=0, minimum=1)
        if at is not None and at > 65535:
            self.problem("port", f"{self.named('port', at)} is no port: they end at 65535")
        return host, at or 0

    def _missing(self, field: str, name: str) -> None:
        if any(problem.field == field for problem in self.problems):
            return
        self.problem(
            field, f"init({field}=...) or {name} is needed" if self.launcher == "arguments" else f"{name} is not set"
        )

    def agent_store(self) -> bool:
        """True where the meeting point is the one that torchrun names, and its agent keeps it open."""
        where = (self.sources.get("address"), self.sources.get("port"))
        return where == ("MASTER_ADDR", "MASTER_PORT") and self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def local(self, rank: int | None, size: int | None, variables: _Variables) -> tuple[int, int, int]:
        """(local_rank, local_world_size, node_rank): the launcher's, unless arguments have moved this process."""
        env = self.environ
        own = (
            next((env[n] for n in variables.rank if n in env), None),
            next((env[n] for n in variables.world_size if n in env), None),
        )
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
        if local_rank >= count:
            self.problem(
                "local_rank", f"{self.named('local_rank', local_rank)}, but {self.named('local_world_size', count)}"
            )
        elif count > size or (size % count and not self._uneven_nodes(tasks)):
            self.problem(
                "local_world_size",
                f"{self.named('world_size', size)} is no multiple of {self.named('local_world_size', count)}",
            )
        return local_rank, count, node or 0

    def _uneven_nodes(self, tasks: Sequence[int]) -> bool:
        """True where the launcher says that machines have different numbers of ranks."""
        nodes = self.environ.get("GROUP_WORLD_SIZE", "1")
        return bool(tasks) or (nodes.isdigit() and int(nodes) > 1)


def _is_host(text: str) -> bool:
    """A name or an address: no port, no scheme, no blanks. Whether it exists is another question."""
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", text) is not None
    return True
