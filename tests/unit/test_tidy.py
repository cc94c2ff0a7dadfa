"""The house rules of DESIGN sections 6 and 7, as far as a machine can hold them.

Each check is a small function from one file to the lines that break a rule. Beside it stand samples it must find, so
that no check can pass by being blind. What ruff has a rule for is ruff's; its configuration is tried on samples too.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LIBRARY_LINES_MAX = 55_900  # of src/lockstep, without its programs: small enough to read
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples", ".ci")
TEXT_SUFFIXES = ("", ".py", ".c", ".h", ".md", ".toml", ".txt", ".json", ".html", ".sh", ".yaml", ".yml")
# Programs as users of stock torch write them, which we ship to be broken: not ours in style, or in what they import.
PROGRAMS = ("src/lockstep/demos/", "src/lockstep/lessons/", "src/lockstep/puzzles/")
HOUSE_CODE_THERE = ("catalog.py", "__init__.py")
NOT_NAMES = ("utils", "util", "helpers", "helper", "manager", "base", "misc", "common")
MAY_IMPORT_TORCH_DISTRIBUTED = (
    "src/lockstep/comm/torch_calls.py",
    "src/lockstep/comm/torch_transport.py",
    "src/lockstep/comm/torch_names.py",
    "src/lockstep/comm/process_group.py",
    "src/lockstep/comm/process_group_calls.py",
    "src/lockstep/comm/process_group_meeting.py",
    "src/lockstep/comm/process_group_routing.py",
    "src/lockstep/comm/process_group_work.py",
    "src/lockstep/comm/init.py",
    "src/lockstep/comm/meeting_point.py",
    "src/lockstep/observe/torch_cuts.py",
    "src/lockstep/observe/torch_groups.py",
    "src/lockstep/observe/torch_models.py",
    "src/lockstep/observe/torch_start.py",
    "src/lockstep/observe/torch_training.py",
    "src/lockstep/observe/torch_watch.py",
    "src/lockstep/launch/agent.py",
    "src/lockstep/launch/channel.py",
    "src/lockstep/launch/job.py",
    "src/lockstep/launch/launcher.py",
    "src/lockstep/launch/loopback.py",
    "src/lockstep/launch/start_port.py",
    "src/lockstep/launch/torchrun_checks.py",
    "src/lockstep/launch/torchrun_flags.py",
    "src/lockstep/launch/workers.py",
    "src/lockstep/parallel/dtensors.py",
    "src/lockstep/parallel/torch_fsdp.py",
)

Finding = tuple[int, str]  # line, what is wrong with it


class Source(NamedTuple):
    """One file: its path from the repository's root, its text and, for Python, its tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


# ------------------------------------------------------------------ sizes


def file_size(source: Source) -> Iterator[Finding]:
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield lines, f"{lines} lines, the limit is {FILE_LINES_MAX}: split it by what it is about"


def function_size(source: Source) -> Iterator[Finding]:
    for node in source.functions:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {lines} lines, the limit is {FUNCTION_LINES_MAX}"


# ------------------------------------------------------------------ names


def file_name(source: Source) -> Iterator[Finding]:
    if Path(source.path).stem in NOT_NAMES:
        yield 1, f"{Path(source.path).name} does not say what it holds"


def class_name(source: Source) -> Iterator[Finding]:
    for node in source.classes:
        if "Manager" in node.name or node.name.startswith("Base"):
            yield node.lineno, f"class {node.name}: name what it is, not that it manages or is a base"


def foreign_word(source: Source) -> Iterator[Finding]:
    """Only names we give: an argument called `is_master` in someone else's signature is theirs."""
    for line, name in _given_names(source.tree):
        if re.search(r"(^|_)master(_|$)|process_index|num_processes", name):
            yield line, f"{name}: the words are rank, world_size and rank 0"


def _given_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


# ------------------------------------------------------------------ words in any text file


def open_end(source: Source) -> Iterator[Finding]:
    yield from _matches(source, r"\b(TO[D]O|FIX[M]E|X[X]X)\b", "finish it or write an issue")


def machine_path(source: Source) -> Iterator[Finding]:
    yield from _matches(source, r"(?<![\w.~])/(root|home|work|opt|Users|mnt)/\w", "a path of one machine")


def registry_host(source: Source) -> Iterator[Finding]:
    pattern = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|index-url[ =]|find-links[ =]"
    yield from _matches(source, pattern, "where packages come from is the machine's own setting")


def _matches(source: Source, pattern: str, why: str) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        found = re.search(pattern, line)
        if found:
            yield number, f"{found.group()!r}: {why}"


# ------------------------------------------------------------------ the library


def docstring(source: Source) -> Iterator[Finding]:
    """Public functions and classes, and the public methods of classes that override nothing."""
    for node in _undocumented(source.tree.body):
        yield node.lineno, f"{node.name} has no docstring"
    for owner in source.classes:
        if not owner.name.startswith("_") and not _bases(owner):  # what a base class documents is not said twice
            for node in _undocumented(owner.body):
                yield node.lineno, f"{owner.name}.{node.name} has no docstring"


def _undocumented(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public definitions that need a docstring and have none."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is None:
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if not node.name.startswith("_") and not marks & {"overload", "setter"}:
                yield node


def _bases(node: ast.ClassDef) -> list[str]:
    """Names of the base classes that can hold methods of their own to override."""
    names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return [name for name in names if name not in ("ABC", "NamedTuple", "Generic", "object")]


def rank_object(source: Source) -> Iterator[Finding]:
    """Nothing in a module knows which rank it is: the communicator is passed in."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: pass it in"
    for node in source.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        constant = isinstance(value, ast.Constant) and value.value is not None
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            words = re.findall(r"[a-z]+", name.lower())
            named = {"rank", "world", "comm", "communicator"} & set(words)
            if named and not constant and isinstance(value, ast.Constant | ast.Call | ast.Dict | ast.List | None):
                yield node.lineno, f"{name} is a rank object of the whole module: pass the communicator in"


def torch_distributed(source: Source) -> Iterator[Finding]:
    """Ruff holds this too, but not for names made at run time."""
    if source.path in MAY_IMPORT_TORCH_DISTRIBUTED:
        return
    for node in (n for n in ast.walk(source.tree) if isinstance(n, ast.stmt | ast.expr)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
            yield node.lineno, "torch.distributed outside the files that may import it"


_LAZY = r"(map|zip|filter|enumerate|iter|chain|chain\.from_iterable|starmap|accumulate|islice|compress)\("


def tuple_of_generator(source: Source) -> Iterator[Finding]:
    """CPython fills such a tuple where all can see it, and raises SystemError if `gc.get_objects` meanwhile holds it.

    The guard's thread makes tuples all the time, beside programs that may look for their leaks so.
    """
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        lazy = [a for a in call.args if isinstance(a, ast.GeneratorExp) or re.match(_LAZY, ast.unparse(a))]
        if ast.unparse(call.func) == "tuple" and lazy:
            yield call.lineno, "tuple([...]): of a generator it fails where another thread calls gc.get_objects()"


# ------------------------------------------------------------------ tests


def sleep(source: Source) -> Iterator[Finding]:
    for node in (n for n in ast.walk(source.tree) if isinstance(n, ast.stmt | ast.expr)):
        by_name = isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in [n.name for n in node.names]
        if by_name or (isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"):
            yield node.lineno, "a test waits on a condition with a deadline, it does not sleep"


def timing(source: Source) -> Iterator[Finding]:
    """A duration that is compared in an assertion. Deadlines (a clock compared with a moment) are not durations."""
    for function in source.functions:
        durations = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _is_duration(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
                if names & durations or any(_is_duration(part) for part in ast.walk(node.test)):
                    yield node.lineno, "speed is a claim of benchmarks/, not of a test"


def _is_duration(node: ast.AST) -> bool:
    clock = re.compile(r"\b(perf_counter|monotonic|process_time|time\.time)(_ns)?\(\)")
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and bool(clock.search(ast.unparse(node.left)))


# ------------------------------------------------------------------ every check, with what it must and must not find


class Rule(NamedTuple):
    """A check, the files it is for (beginnings of paths), and samples: bad ones it must find, good ones it must not."""

    check: Callable[[Source], Iterator[Finding]]
    where: tuple[str, ...]
    bad: tuple[str, ...]
    good: tuple[str, ...] = ("",)
    suffixes: tuple[str, ...] = (".py",)
    path: str = "src/lockstep/train/sample.py"


_LONG = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES_MAX
_TESTS = ("tests/",)
_LIBRARY = ("src/",)
_CODE = ("src/", "tests/", "benchmarks/", "examples/")
_CLOCK = "def test() -> None:\n    start = time.perf_counter()\n"

RULES = (
    Rule(file_size, _CODE, ("x = 1\n" * (FILE_LINES_MAX + 1),), ("x = 1\n" * FILE_LINES_MAX,)),
    Rule(function_size, _CODE, (_LONG,), (_LONG.removesuffix("    pass\n"),)),
    Rule(file_name, _CODE, ("x = 1\n",), (), path="src/lockstep/utils.py"),
    Rule(class_name, _CODE, ("class RunManager: ...", "class BaseLayer: ..."), ("class Layer(BaseModel): ...",)),
    Rule(
        foreign_word,
        _CODE,
        ("def f(num_processes): ...", "master = 1", "self.process_index = 0", "class C:\n    is_master: bool"),
        ('os.environ["MASTER_ADDR"]', "store(is_master=True)", "mastery = 1", "MASTER_ADDR = 'MASTER_ADDR'"),
    ),
    Rule(open_end, ("",), ("# TO·DO later", "FIX·ME"), ("mkstemp(XXXXXX)",), TEXT_SUFFIXES),
    Rule(machine_path, ("",), ("cd /ro·ot/x", '"/ho·me/me/x"'), ("~/home/x", "a/work/b", "../opt/x"), TEXT_SUFFIXES),
    Rule(registry_host, ("",), ("https://py·pi.org/x", "--index-·url x"), ("the package index",), TEXT_SUFFIXES),
    Rule(
        docstring,
        _LIBRARY,
        ("def f() -> None: ...", "class C: ...", 'class C:\n    """C."""\n    def f(self): ...'),
        ("def _f() -> None: ...", 'class C(Work):\n    """C."""\n    def wait(self): ...', 'def f():\n    """F."""'),
    ),
    Rule(
        rank_object,
        _LIBRARY,
        ("_comm = None", "RANK: int | None = None", "world = init()", "def f():\n    global x\n    x = 1"),
        ("RANK_VARIABLE = 'RANK'", "def f(comm):\n    rank = comm.rank", "command = None", "_COMM_KINDS = ('a',)"),
    ),
    Rule(
        torch_distributed,
        _LIBRARY,
        (
            "import torch.distributed as dist",
            "from torch import distributed",
            "from torch.distributed import Store",
            "torch.distributed.barrier()",
            "importlib.import_module('torch.distributed')",
        ),
        ("import torch", "from lockstep.comm.torch_names import Joinable"),
    ),
    Rule(
        tuple_of_generator,
        ("src/lockstep/observe/",),
        ("tuple(one for one in ones)", "tuple(map(int, ones))", "tuple(zip(ones, twos))", "tuple(chain(ones, twos))"),
        ("tuple([*ones])", "tuple()", "tuple(mapped)", "tuple(sorted(ones))"),
    ),
    Rule(sleep, _TESTS, ("import time\ntime.sleep(1)", "from time import sleep"), ("event.wait(1)",)),
    Rule(
        timing,
        _TESTS,
        (
            _CLOCK + "    took = time.perf_counter() - start\n    assert took < 1",
            _CLOCK + "    assert time.time() - start < 1",
        ),
        (
            _CLOCK + "    deadline = time.monotonic() + 9\n    assert time.monotonic() < deadline",
            "assert comm.timeout_s < 9",
        ),
    ),
)


def _files() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git")  # of a work tree
    for folder in FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file())


def _sources() -> list[Source]:
    sources = []
    for path in _files():
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text) if path.suffix == ".py" else ast.Module([], [])
            sources.append(Source(path.relative_to(ROOT).as_posix(), text, tree))
    return sources


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    found = _sources()
    paths = {source.path for source in found}
    assert {"README.md", "Makefile", ".ci/run", "src/lockstep/errors.py", "tests/unit/test_tidy.py"} <= paths
    return found


def _sample(rule: Rule, text: str) -> list[Finding]:
    text = text.replace("·", "")  # so that a sample is not found where it is written
    tree = ast.parse(text) if rule.suffixes == (".py",) else ast.Module([], [])
    return list(rule.check(Source(rule.path, text, tree)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rule_holds(rule: Rule, sources: list[Source]) -> None:
    for text in rule.bad:
        assert _sample(rule, text), f"the check is blind to:\n{text}"
    for text in rule.good:
        assert not _sample(rule, text), f"the check refuses what is right:\n{text}"
    chosen = [s for s in sources if s.path.startswith(rule.where) and s.path.endswith(rule.suffixes)]
    if rule.where == _LIBRARY:
        chosen = [s for s in chosen if not s.path.startswith(PROGRAMS) or s.path.endswith(HOUSE_CODE_THERE)]
    problems = [f"{s.path}:{line}: {message}" for s in chosen for line, message in rule.check(s)]
    assert not problems, "\n" + "\n".join(problems)


# ------------------------------------------------------------------ what needs the whole library


def overridden_classes(trees: dict[str, ast.Module]) -> list[str]:
    """Classes that inherit from a class of this library that is neither abstract nor an error."""
    found = {n.name: (path, n) for path, t in trees.items() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}

    def is_error(node: ast.ClassDef) -> bool:
        names = [ast.unparse(base) for base in node.bases]
        return any(hasattr(builtins, n) and n.endswith(("Error", "Exception")) for n in names) or any(
            is_error(found[n][1]) for n in names if n in found
        )

    def is_abstract(node: ast.ClassDef) -> bool:
        marks = [ast.unparse(mark) for part in node.body for mark in getattr(part, "decorator_list", ())]
        direct = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases} & {"ABC", "Protocol"}
        return bool(direct) or any(mark.endswith("abstractmethod") for mark in marks)

    problems = []
    for path, node in found.values():
        for base in (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases):
            if base in found and not is_abstract(found[base][1]) and not is_error(found[base][1]):
                problems.append(f"{path}:{node.lineno}: {node.name} inherits from {base}, which is not abstract")
    return problems


def test_classes_are_abstract_or_final(sources: list[Source]) -> None:
    sample = "class A: ...\nclass B(A): ...\nclass C(abc.ABC): ...\nclass D(C): ..."
    sample += "\nclass E(ValueError): ...\nclass F(E): ..."
    assert overridden_classes({"x.py": ast.parse(sample)}) == ["x.py:2: B inherits from A, which is not abstract"]
    problems = overridden_classes({s.path: s.tree for s in sources if s.path.startswith("src/")})
    assert not problems, "\n" + "\n".join(problems)


def test_library_is_small_enough_to_read(sources: list[Source]) -> None:
    library = [s for s in sources if s.path.startswith("src/") and s.path.endswith(".py")]
    lines = sum(s.text.count("\n") for s in library if not s.path.startswith(PROGRAMS))
    assert 0 < lines <= LIBRARY_LINES_MAX, f"src/ has {lines} lines, the ceiling is {LIBRARY_LINES_MAX}"


# ------------------------------------------------------------------ ruff's rules are on

_REFUSED = (
    ("src/lockstep/parallel/sample.py", "import torch.distributed as dist\n\ndist.barrier()\n", "TID251"),
    ("src/lockstep/parallel/sample.py", "from torch.nn.parallel import DataParallel\n\nDataParallel\n", "TID251"),
    ("src/lockstep/comm/sample.py", "import pickle\n\npickle.dumps(1)\n", "TID251"),
    ("src/lockstep/checkpoint/sample.py", 'import torch\n\ntorch.load("x")\n', "TID251"),
    ("src/lockstep/comm/sample.py", "def f(x) -> None:\n    x()\n", "ANN001"),
    ("src/lockstep/comm/sample.py", "def f(x: int):\n    return x\n", "ANN201"),
    ("tests/unit/test_sample.py", "def test_f(x) -> None:\n    x()\n", "ANN001"),
    ("src/lockstep/comm/sample.py", "try:\n    f()\nexcept:\n    x = 1\n", "E722"),
    ("src/lockstep/comm/sample.py", "try:\n    f()\nexcept Exception:\n    pass\n", "S110"),
    ("src/lockstep/comm/sample.py", "try:\n    f()\nexcept Exception as error:\n    x = error\n", "BLE001"),
    ("src/lockstep/comm/sample.py", 'print("x")\n', "T201"),
)
_ALLOWED = (
    ("src/lockstep/comm/torch_transport.py", "import torch.distributed as dist\n\ndist.barrier()\n"),
    ("tests/contract/test_sample.py", "import torch.distributed as dist\n\ndist.barrier()\n"),
    ("src/lockstep/cli/sample.py", 'print("x")\n'),
)


def _ruff(path: str, text: str) -> str:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
        path,
        "-",
    ]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False).stdout


def test_ruff_refuses_what_the_house_forbids() -> None:
    for path, text, rule in _REFUSED:
        assert f" {rule} " in _ruff(path, text), f"ruff lets this pass in {path}:\n{text}"
    for path, text in _ALLOWED:
        assert "All checks passed" in _ruff(path, text), f"ruff refuses this in {path}:\n{text}"


def test_slow_tests_are_there() -> None:
    for line in (ROOT / "tests" / "slow_tests.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, _, name = line.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), line
