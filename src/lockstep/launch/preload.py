"""Which modules a program will import, as far as they can be imported before it runs: installed ones, never its own.

The program's own files are only read: what they import in turn is found too.
"""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lockstep.launch.program import Program

# they look for other ranks, or start threads, as soon as they are imported
_NOT_BEFORE_THE_FORK = frozenset(
    ("mpi4py", "horovod", "jax", "tensorflow", "ray", "deepspeed", "wandb", "cupy", "pycuda", "pyspark", "__future__")
)
# torch loads them at the first use of an optimizer, DistributedDataParallel or a DataLoader, which takes seconds
WITH_TORCH = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
_FILES_MAX = 300  # of a program's own that are read


def modules_to_preload(program: Program, folder: Path) -> list[str]:
    """What `program`, started in `folder`, imports at the top level of its files; in order, without its own modules.

    Of `from a import b` both a and a.b are named: b may be a module, or a name that is loaded when it is first used.
    """
    root, waiting = _where_it_begins(program, folder)
    seen, found = set(waiting), dict[str, None]()
    while waiting:
        path = waiting.pop(0)
        for level, name in _imports_of(path):
            own = _own_files(name, path.parents[level - 1] if level else root)
            if not own and not level and name.partition(".")[0] not in _NOT_BEFORE_THE_FORK:
                found[name] = None
            more = [file for file in own if file not in seen and len(seen) < _FILES_MAX]
            seen.update(more)
            waiting += more
    return list(found)


def _where_it_begins(program: Program, folder: Path) -> tuple[Path, list[Path]]:
    """(the folder that will be first on the search path, the first files)."""
    if program.kind == "script":
        script = (folder / program.name).resolve()
        return script.parent, [script] if script.is_file() else []
    if program.kind == "module":
        return folder, _own_files(f"{program.name}.__main__", folder)
    return folder, []


def _own_files(name: str, root: Path) -> list[Path]:
    """The program's files that `import name` runs: a module's, and before it those of the packages around it."""
    files: list[Path] = []
    path = root
    for part in name.split(".") if name else ():
        path = path / part
        files += [file for file in (path / "__init__.py", path.with_name(f"{part}.py")) if file.is_file()]
    return files


def _imports_of(path: Path) -> list[tuple[int, str]]:
    """(number of dots before it, name) of each import in a file; none where it is no Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    return list(_imports(tree.body))


def _imports(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Also within `try`, `if` and `with`, which often guard an import; not within functions, which may never run."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = [node.module] if node.module else []
            yield from ((node.level, name) for name in within)
            yield from ((node.level, ".".join([*within, alias.name])) for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Try | ast.If | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, part, []))


def is_installed(name: str) -> bool:
    """True for modules of installed packages and of lockstep itself, without importing any. Python's own load fast."""
    top = name.partition(".")[0]
    if top == "lockstep":
        return True
    if top in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    roots.append(site.getusersitepackages())
    return any(place and any(Path(place).is_relative_to(root) for root in roots) for place in places)
