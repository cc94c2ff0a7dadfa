"""The ranks of a benchmark as an MPI world, where mpi4py and the `mpiexec` of its MPI are installed.

Processes that were started one by one cannot become an MPI world, so `mpiexec` starts them. Nothing else changes for
them: they meet through the same file, and run every other variant too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Any

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH and what descends from it, Open MPI
_PROBE = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != int(sys.argv[1]))"
_PROBE_S = 60.0
# Open MPI would refuse more ranks than cores, and would tie ranks to cores, which ranks started one by one are not.
_AS_STARTED_ONE_BY_ONE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def mpiexec(world_size: int) -> list[str]:
    """What to put before the command of a rank."""
    return ["mpiexec", "-n", str(world_size)]


def mpi_environment() -> dict[str, str]:
    """Variables for `mpiexec`, where the user has not set them."""
    return {name: value for name, value in _AS_STARTED_ONE_BY_ONE.items() if name not in os.environ}


def why_no_mpi(world_size: int) -> str:
    """Why `world_size` processes cannot be an MPI world here; "" where they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpiexec") is None:
        return "there is no mpiexec on PATH"
    command = [*mpiexec(world_size), sys.executable, "-c", _PROBE, str(world_size)]
    env = os.environ | mpi_environment()
    try:
        probe = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"mpiexec did not end within {_PROBE_S:.0f} s"
    if probe.returncode == 0:
        return ""
    said = [line.strip() for line in probe.stderr.splitlines() if line.strip(" -")]
    why = f"its last words are {said[-1]!r}" if said else "it belongs to another MPI than mpi4py"
    return f"mpiexec does not start a world of {world_size} ranks: {why}"


def mpi_rank() -> int:
    """The rank that mpiexec gave this process."""
    return next(int(os.environ[name]) for name in _RANK if name in os.environ)


def load_mpi() -> Any:
    """mpi4py's MPI module. The first call joins the MPI world: every rank, at about the same time."""
    return importlib.import_module("mpi4py.MPI")
