"""The methods in C of `lockstep.observe.native`, compiled where that can be done; else the library is Python alone."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src", "lockstep", "observe", "native")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-cast-function-type")
SHARED = ("-shared", "-fPIC", "-fvisibility=hidden")


class NativeMethods(BuildHookInterface):
    """Compiles beside the sources: an editable install has them there, a wheel takes them along."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is put together."""
        folder = Path(self.root, FOLDER)
        built = folder / f"_methods{sysconfig.get_config_var('EXT_SUFFIX')}"
        why_not = reason_against() or compile_into(built, folder)
        if why_not:
            built.unlink(missing_ok=True)
            self.app.display_warning(f"lockstep: its methods in C are not built, so they are Python's: {why_not}")
            return
        build_data["artifacts"].append(str(FOLDER / built.name))
        build_data["pure_python"], build_data["infer_tag"] = False, True


def reason_against() -> str:
    """Why there is nothing to compile for this Python, or ""."""
    if os.environ.get("LOCKSTEP_NATIVE") == "off":
        return "LOCKSTEP_NATIVE=off"
    if sys.platform != "linux" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this is not CPython with its lock, on Linux"
    return ""


def compile_into(built: Path, folder: Path) -> str:
    """Compile the sources in `folder`; why that could not be done, or ""."""
    named = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"]
    found = [words for words in (shlex.split(name) for name in named if name) if shutil.which(words[0])]
    if not found:
        return "there is no compiler"
    new = built.with_suffix(f".{os.getpid()}")
    sources = sorted(folder.glob("*.[ch]"))
    checksum = zlib.crc32(b"".join([path.read_bytes() for path in sources]))  # as the library compares it
    given = [f"-DSOURCES={checksum}L", f"-I{sysconfig.get_path('include')}", *map(str, folder.glob("*.c"))]
    done = subprocess.run([*found[0], *FLAGS, *SHARED, *given, "-o", str(new)], capture_output=True, text=True)
    if done.returncode:
        return f"{found[0][0]} says {done.stderr.strip()[:500]}"
    new.replace(built)  # at once: others may be running what is there
    return ""
