"""What `lockstep doctor` was asked to look at: torchrun's flags, read before there is torch."""

from __future__ import annotations

import os
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.comm.place import Place, read_place
from lockstep.errors import ConfigError
from lockstep.launch.words import Words, read_range

DEFAULT_PORT = 29500  # torchrun's
_PROCESSES_PER_CORE = 32  # a slip of the finger beyond: each takes some 400 MB
_FLAGS = (
    "nproc-per-node nnodes node-rank rdzv-backend rdzv-endpoint rdzv-id rdzv-conf master-addr master-port local-addr"
)
_DEFAULTS = {"nnodes": "1:1", "rdzv-backend": "static", "rdzv-id": "none", "node-rank": None, "master-port": None}
_SHORT = {"nproc-per-node": ("-n", "--nproc")}  # as for `lockstep train`
_DESCRIPTION = """Check this machine, and with several the way between them, before a run is started.

On one machine it starts its own processes (2, unless --nproc-per-node says more). On several: run the same command on
each, as you would start `lockstep run`; under Slurm, `srun lockstep doctor`. Exit code 1 where a run would fail."""


@dataclass(frozen=True)
class Asked:
    """The run that is to be examined."""

    words: tuple[str, ...]  # for torchrun's own parser
    machines: int  # that have to come
    processes: int  # of this machine
    host: str = ""  # where the machines meet; "" for one machine
    port: int = DEFAULT_PORT
    source: str = ""  # the flag or variable that named host and port; "" for torchrun's default
    node_rank: int | None = None  # None: machines get their numbers when they meet
    is_host: bool | None = None  # this machine opens the port; None: it does where `host` is its address
    is_json: bool = False
    wait_s: float = 60.0

    @property
    def place(self) -> Place:
        """The meeting point, for what looks at it."""
        number = self.node_rank if self.node_rank is not None else 0 if self.is_host else 1
        source = self.source or "torchrun's default"
        return meeting_place(number, max(self.machines, 2), self.host or "127.0.0.1", self.port, source)


def meeting_place(number: int, machines: int, host: str, port: int, source: str) -> Place:
    """Where machine `number` meets the others, as the flag or variable `source` says."""
    return Place(number, machines, 0, 1, number, host, port, "", "arguments", (("address", source), ("port", source)))


def read_asked(words: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """The words after `lockstep doctor`. --help ends the process. Raises: ConfigError."""
    args = _parser(environ).read(words)
    if not 0 < args.wait_s < 1e6:
        raise ConfigError(f"--wait-s {args.wait_s:g}: it is a number of seconds above 0")
    place, problems = read_place(environ)
    if place.launcher == "torchrun":
        raise ConfigError("torchrun started this: `lockstep doctor` takes torchrun's flags and starts ranks itself")
    names_machines = args.nnodes != "1:1" or args.rdzv_endpoint or args.master_addr or args.standalone
    if not (names_machines or problems) and place.launcher in ("slurm", "environment") and place.world_size > 1:
        return _one_of_many(args, place)
    return _from_flags(args, environ)


def refuse_meeting(machines: int, node_rank: int | None, port: int | None) -> None:
    """Raises: ConfigError for a machine, or a port, that there cannot be."""
    if node_rank is not None and not 0 <= node_rank < machines:
        raise ConfigError(f"--node-rank {node_rank}, but --nnodes {machines}: machines are 0 to {machines - 1}")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"port {port} is to be where the machines meet: ports are 1 to 65535")


def refuse_crowd(flag: str, processes: int) -> None:
    """Raises: ConfigError for more processes than could ever live on this machine."""
    cores = os.cpu_count() or 1
    if processes > _PROCESSES_PER_CORE * cores:
        raise ConfigError(f"{flag}: this machine has {cores} cores, so many would only kill it")


def _one_of_many(args: Namespace, place: Place) -> Asked:
    """Somebody else has started one process for each rank: each is examined as a machine with one."""
    meeting = f"--master-addr {place.address} --master-port {place.port} --rdzv-conf timeout={args.wait_s:.0f}"
    words = f"--nnodes {place.world_size} --node-rank {place.rank} --nproc-per-node 1 {meeting}"
    return Asked(
        tuple(words.split()), place.world_size, processes=1, host=place.address, port=place.port,
        source=place.source("address"), node_rank=place.rank, is_host=place.rank == 0,
        is_json=args.json, wait_s=args.wait_s,
    )  # fmt: skip


def _from_flags(args: Namespace, environ: Mapping[str, str]) -> Asked:
    smallest, largest = read_range("--nnodes", args.nnodes, "machines")
    processes = args.nproc_per_node or ("2" if largest == 1 else "1")
    words = ["--nproc-per-node", processes]
    if largest == 1:
        port, source = _own_port(args, environ)
        refuse_meeting(1, None, port)
        words, here = [*words, "--standalone"], _count(processes)
        return Asked(tuple(words), 1, here, port=port, source=source, is_json=args.json, wait_s=args.wait_s)
    words += ["--nnodes", args.nnodes]
    if args.rdzv_backend == "static" and smallest != largest:
        raise ConfigError("--nnodes A:B needs a rendezvous that counts: --rdzv-backend c10d --rdzv-endpoint HOST:PORT")
    if args.rdzv_backend == "static" and args.node_rank is None:
        raise ConfigError("--nnodes needs --node-rank on each machine or --rdzv-backend c10d --rdzv-endpoint HOST:PORT")
    if args.rdzv_backend not in ("static", "c10d"):
        raise ConfigError(f"--rdzv-backend {args.rdzv_backend}: the doctor meets by c10d or static")
    host, port, source = _meeting_point(args, environ)
    refuse_meeting(largest, args.node_rank if args.rdzv_backend == "static" else None, port)
    words += ["--rdzv-backend", args.rdzv_backend, "--rdzv-id", args.rdzv_id, "--rdzv-endpoint", f"{host}:{port}"]
    settings = dict(pair.split("=", 1) for pair in args.rdzv_conf.split(",") if "=" in pair)
    settings.setdefault("timeout" if args.rdzv_backend == "static" else "join_timeout", f"{args.wait_s:.0f}")
    words += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())]
    if args.node_rank is not None:
        words += ["--node-rank", str(args.node_rank)]
    if args.local_addr:
        words += ["--local-addr", args.local_addr]
    is_host = args.node_rank == 0 if args.rdzv_backend == "static" else _truth(settings.get("is_host"))
    number = args.node_rank if args.rdzv_backend == "static" else None
    return Asked(tuple(words), smallest, _count(processes), host, port, source, number, is_host, args.json, args.wait_s)


def _own_port(args: Namespace, environ: Mapping[str, str]) -> tuple[int, str]:
    if args.master_port is not None:
        return args.master_port, "--master-port"
    text = environ.get("MASTER_PORT", "")
    return (int(text), "MASTER_PORT") if text.isdigit() and 0 < int(text) < 65536 else (DEFAULT_PORT, "")


def _meeting_point(args: Namespace, environ: Mapping[str, str]) -> tuple[str, int, str]:
    if args.rdzv_endpoint:
        host, _, port = args.rdzv_endpoint.rpartition(":") if _ends_with_port(args.rdzv_endpoint) else (
            args.rdzv_endpoint, "", str(29400 if args.rdzv_backend == "c10d" else DEFAULT_PORT)
        )  # fmt: skip
        return host.strip("[]"), int(port), "--rdzv-endpoint"
    if args.rdzv_backend == "c10d":
        raise ConfigError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on every machine")
    host = args.master_addr or "127.0.0.1"
    if not args.master_addr and "MASTER_ADDR" in environ:
        why, name = "because torchrun and `lockstep run` do not read the variable", environ["MASTER_ADDR"]
        raise ConfigError(f"MASTER_ADDR={name} is no flag: give --master-addr {name}, {why}")
    port = DEFAULT_PORT if args.master_port is None else args.master_port
    return host, port, "--master-addr" if args.master_addr else ""


def _ends_with_port(endpoint: str) -> bool:
    head, _, tail = endpoint.rpartition(":")
    return bool(head) and tail.isdigit() and (":" not in head or head.endswith("]"))


def _count(processes: str) -> int:
    last = processes.rpartition(":")[2]
    if last.isdigit() and int(last) > 0:
        refuse_crowd(f"--nproc-per-node {processes}", int(last))
        return int(last)
    if last in ("auto", "cpu", "gpu"):
        return os.cpu_count() or 1
    raise ConfigError(f"--nproc-per-node {processes}: it is a number of processes, or auto, cpu, gpu")


def _truth(text: str | None) -> bool | None:
    return None if text is None else text.lower() in ("1", "true", "t", "yes", "y")


def _parser(environ: Mapping[str, str]) -> Words:
    form = RawDescriptionHelpFormatter
    made = Words("lockstep doctor", description=_DESCRIPTION, formatter_class=form, allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="one JSON object with all checks, in place of lines")
    wait = "how long to wait for other machines, and for an answer (default: 60)"
    made.add_argument("--wait-s", "--wait_s", type=float, default=60.0, metavar="SECONDS", help=wait)
    own = made.add_argument_group("as for torchrun and `lockstep run`")
    own.add_argument("--standalone", action="store_true")
    for name in _FLAGS.split():
        snake, default = name.replace("-", "_"), _DEFAULTS.get(name, "")
        given = environ.get(f"PET_{snake.upper()}", default)
        names = dict.fromkeys((f"--{name}", f"--{snake}", *_SHORT.get(name, ())))
        own.add_argument(*names, type=int if default is None else str, default=given)
    return made
