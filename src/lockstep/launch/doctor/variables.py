"""Environment variables that are misspelt, contradict each other, or do harm. Pure, no torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.comm.place import read_place
from lockstep.launch.doctor.asked import Asked
from lockstep.launch.doctor.check import Check

_NAMES = json.loads(Path(__file__).with_name("variables.json").read_text())
KNOWN = frozenset(_NAMES["known"])  # what a person sets; what is close to one of these, and none, was meant to be it
_MISTAKES: dict[str, str] = _NAMES["mistakes"]  # too far from what was meant to be found by likeness
_SLOW: dict[str, str] = _NAMES["slow"]  # and why
_BEGINNINGS = "NCCL GLOO TORCH_NCCL TORCH_DIST MASTER WORLD LOCAL LOCKSTEP CUDA_V CUDA_L OMP_"
_LIKENESS = 0.9


def check_variables(environ: Mapping[str, str], asked: Asked, cores: int) -> list[Check]:
    """Everything that is wrong with the variables, or one check that says that nothing is."""
    found = [*_misspelt(environ), *_place(environ), *_against_flags(environ, asked)]
    found += _harmful(environ, asked, cores)
    shown = [name for name in sorted(environ) if name in KNOWN]
    return found or [Check("ok", "variables", ", ".join(shown) or "none of torch's, NCCL's or Gloo's is set")]


def _misspelt(environ: Mapping[str, str]) -> Iterator[Check]:
    for name in sorted(environ):
        meant = meant_by(name)
        if meant:
            yield _warn(f"{name} means nothing: was {meant} meant?", f"unset {name}; export {meant}={environ[name]}")


def meant_by(name: str) -> str:
    """The variable that somebody meant who set `name`; "" where nothing is wrong with it."""
    upper = name.upper()
    if name in KNOWN or not upper.startswith((*_BEGINNINGS.split(), *_MISTAKES)):
        return ""
    if upper in _MISTAKES:
        return _MISTAKES[upper]
    bare = {known.replace("_", ""): known for known in KNOWN}
    if upper.replace("_", "") in bare:
        return bare[upper.replace("_", "")]
    return next(iter(difflib.get_close_matches(upper, sorted(KNOWN), 1, _LIKENESS)), "")


def _place(environ: Mapping[str, str]) -> Iterator[Check]:
    """RANK and WORLD_SIZE in a shell: what a process started here would make of them."""
    place, problems = read_place(environ)
    fixes = {
        "environment": "unset RANK WORLD_SIZE LOCAL_RANK, and let `lockstep run` or torchrun set them",
        "slurm": "start the ranks with srun, or set MASTER_ADDR and MASTER_PORT",
    }
    port = environ.get("MASTER_PORT") or "29500"
    if place.launcher in fixes:
        for problem in problems:
            yield Check("FAIL", "variables", problem.text, fixes[place.launcher])
        if place.launcher == "environment" and environ.get("SLURM_PROCID") not in (None, environ.get("RANK")):
            text = f"RANK={environ.get('RANK')}, but SLURM_PROCID={environ['SLURM_PROCID']}: Slurm's are not looked at"
            yield _warn(text, "where srun is to number the ranks: unset RANK WORLD_SIZE LOCAL_RANK")
    elif "SLURM" in place.note:
        yield _warn(place.note, "srun lockstep doctor")
    elif not (port.isdigit() and 0 < int(port) < 65536):
        text = f"MASTER_PORT={port} is no port: a script that is started by hand ends with it"
        yield Check("FAIL", "variables", text, "export MASTER_PORT=29500")


def _against_flags(environ: Mapping[str, str], asked: Asked) -> Iterator[Check]:
    several = asked.machines > 1
    address = environ.get("MASTER_ADDR", "")
    if several and address and address != asked.host:
        text = f"MASTER_ADDR={address}, but {asked.source or 'the default'} says {asked.host}: the flag counts"
        yield _warn(text, "unset MASTER_ADDR")
    if several and (asked.host == "localhost" or asked.host.startswith("127.") or asked.host == "::1"):
        text = f"{asked.machines} machines are to meet at {asked.host}: each asks itself, unless all are one"
        yield _warn(text, "give all the name or address of one: --master-addr HOST, or --rdzv-endpoint HOST:PORT")
    nodes = environ.get("SLURM_NNODES", "")
    if nodes.isdigit() and int(nodes) > 1 and asked.machines == 1:
        flags = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        text = f"SLURM_NNODES={nodes}, but only this machine is examined"
        yield _warn(text, f"srun --ntasks-per-node=1 lockstep doctor {flags}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if several and environ.get(name, "").lstrip("=") == "lo":
            yield Check("FAIL", "variables", f"{name}=lo: no other machine can be reached through it", f"unset {name}")


def _harmful(environ: Mapping[str, str], asked: Asked, cores: int) -> Iterator[Check]:
    for name, why in _SLOW.items():
        if environ.get(name, "0") not in ("", "0"):
            yield _warn(f"{name}={environ[name]}: {why}", f"unset {name}")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        why = "torch 2.13 crashes while DDP is made on Gloo, and other steps take 2-3 times as long"
        yield _warn(f"TORCH_DISTRIBUTED_DEBUG=DETAIL: {why}", "unset TORCH_DISTRIBUTED_DEBUG")
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"):
        if old in environ:
            yield _warn(f"{old} has another name now", f"unset {old}; export TORCH_{old}={environ[old]}")
    if environ.get("LOCKSTEP_SHM", "on").lower() in ("off", "0"):
        yield _warn("LOCKSTEP_SHM=off: ranks of this machine use sockets", "unset LOCKSTEP_SHM")
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * asked.processes > cores and int(threads) > 1:
        text = f"OMP_NUM_THREADS={threads} for {asked.processes} ranks on {cores} cores: they get in each other's way"
        yield _warn(text, f"export OMP_NUM_THREADS={max(1, cores // asked.processes)}")


def _warn(found: str, fix: str) -> Check:
    return Check("warn", "variables", found, fix)
