"""What a run was, so that somebody can do it again: command, versions, commit, machine, variables, config."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ORIGINS = "LOCKSTEP_ORIGINS"  # JSON: of each variable that a launcher has set, how it came to that
_NAMES = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|MKL_NUM_THREADS"
    r"|PYTHONHASHSEED|CUDA_\w+|CUBLAS_\w+|NCCL_\w+|GLOO_\w+|TORCH_\w+|TORCHELASTIC_\w+|PYTORCH_\w+|LOCKSTEP_\w+"
    r"|HF_\w+|TOKENIZERS_\w+|SLURM_(JOB_ID|JOB_NAME|JOB_NODELIST|NNODES|NTASKS|PROCID|LOCALID|RESTART_COUNT))"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_TEXT = re.compile(r"TOKEN(S(?![A-Z])|IZER)", re.IGNORECASE)  # what models read: `--max_tokens`, TOKENIZERS_PARALLELISM
_OF_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)
_INTERNAL = re.compile(r"LOCKSTEP_(AGENT_PID|FLIGHT|PULSE|ORIGINS)|TORCHELASTIC_(ERROR_FILE|SIGNALS_TO_HANDLE)")
_HIDDEN = "(not written down)"
_CHARS = 300  # of a value


def run_facts(
    environ: Mapping[str, str], command: Sequence[str], *, config: Mapping[str, Any] | None = None, data: str = ""
) -> dict[str, Any]:
    """As a note has it. config: the options of the run; data: a digest of what it is trained on."""
    facts: dict[str, Any] = {
        "command": without_secrets(command),
        "cwd": os.getcwd(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "lockstep": sys.modules["lockstep"].__version__,
        "commit": commit_of(Path(command[0]).resolve().parent) if command else "",
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "variables": variables_of(environ),
    }
    if config is not None:
        facts["config"] = {name: _HIDDEN if is_secret(name) else value for name, value in config.items()}
        facts["config_sha256"] = hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()
    if data:
        facts["data"] = data
    return facts


def variables_of(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables that decide how a run goes: name -> [value, where it came from]. No secrets."""
    origins: dict[str, str] = json.loads(environ.get(ORIGINS, "{}"))
    found = {}
    for name in sorted(environ):
        if environ[name] and _NAMES.fullmatch(name) and not _INTERNAL.fullmatch(name):
            value = _HIDDEN if is_secret(name) else environ[name][:_CHARS]
            found[name] = [value, origins.get(name) or _origin(name, environ)]
    return found


def is_secret(name: str) -> bool:
    """Whether what has this name is not to be written down."""
    return _SECRET.search(_TEXT.sub("", name)) is not None


def _origin(name: str, environ: Mapping[str, str]) -> str:
    if name.startswith("SLURM_"):
        return "Slurm"
    if "TORCHELASTIC_RUN_ID" in environ and _OF_TORCHRUN.fullmatch(name):
        return "launcher" if ORIGINS in environ else "torchrun"
    return "environment"


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command without the values of options that are named like secrets: `--api-key X`, `--token=X`."""
    told: list[str] = []
    for word in words:
        name, is_given, _ = word.partition("=")
        after = told[-1] if told else ""
        if is_given and is_secret(name):
            word = f"{name}={_HIDDEN}"
        elif after.startswith("-") and "=" not in after and is_secret(after) and not word.startswith("-"):
            word = _HIDDEN
        told.append(word)
    return told


def commit_of(folder: Path) -> str:
    """The commit that is checked out in `folder` or above; "" where no git is. Changes since then are not seen."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # of a work tree, or a submodule
            git = place / git.read_text().removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            return _read_head(git)
    return ""


def _read_head(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name, shared = head[5:], git / "commondir"
    common = git / shared.read_text().strip() if shared.is_file() else git
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text().strip()
    packed = common / "packed-refs"
    rows = packed.read_text().splitlines() if packed.is_file() else []
    return next((row.split()[0] for row in rows if row.endswith(f" {name}")), "")
