"""What loads torch, and what must not, so that the command line answers at once (how fast: benchmarks/bench_cli.py)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import lockstep

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


def imported(*arguments: str) -> tuple[set[str], str]:
    """Names of all modules that a fresh Python loads for `arguments`, and what it printed."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    spoken = [line for line in done.stderr.splitlines() if not line.lstrip().startswith("import time:")]
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}" + "\n".join(spoken)
    return set(re.findall(r"^import time:.*\|\s*([\w.]+)$", done.stderr, re.MULTILINE)), done.stdout


def test_import_lockstep_loads_nothing_heavy() -> None:
    modules, _ = imported("-c", "import lockstep; lockstep.__version__; dir(lockstep)")
    assert "lockstep" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help")], ids=" ".join)
def test_help_does_not_load_torch(arguments: tuple[str, ...]) -> None:
    modules, printed = imported("-m", "lockstep", *arguments)
    assert "train" in printed
    assert "lockstep.cli" in modules
    assert not modules & set(HEAVY)


def test_public_names_resolve_and_load_torch_only_then() -> None:
    modules, printed = imported("-c", "import lockstep; print([str(getattr(lockstep, n)) for n in lockstep.__all__])")
    assert "DistributedDataParallel" in printed
    assert "torch" in modules, "this test would not notice torch being loaded"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DistributedDataParalel'"):
        _ = lockstep.DistributedDataParalel


def test_every_error_is_public_and_of_one_kind() -> None:
    command = "import lockstep; print(lockstep.LockstepError is lockstep.errors.LockstepError)"
    modules, printed = imported("-c", command)
    assert (printed, modules & set(HEAVY)) == ("True\n", set())
    kinds = [each for each in vars(lockstep.errors).values() if isinstance(each, type)]
    assert len(kinds) > 20
    assert all(issubclass(each, lockstep.LockstepError) for each in kinds if each.__module__ == "lockstep.errors")
