"""Checkpoints whose author wants harm: a clear error, little memory, and nothing imported, run or opened outside."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostile_checkpoints import CASES, DATA, HEADER, body
from lockstep.checkpoint.manifest import FORMAT, from_text, to_text
from lockstep.checkpoint.tensor_file import read_header
from lockstep.errors import CheckpointDamaged, CheckpointError
from small_checkpoints import raw_file, raw_manifest

PROGRAM = Path(__file__).resolve().parents[1] / "hostile_loads.py"
LARGE = ("million", "many tokens", "path long", "deep")  # their own size is tens of MiB


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What loading each case came to, all in one process."""
    parent = tmp_path_factory.mktemp("hostile")
    for name, case in CASES.items():
        folder = parent / name.replace("/", " ") / "step-00000001"
        folder.mkdir(parents=True)
        case.make(folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, str(PROGRAM), str(parent)]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(elsewhere.iterdir())
    return json.loads(done.stdout)


def test_the_hook_sees_what_it_is_to_see(results: dict[str, Any]) -> None:
    seen = " ".join(results["hook"]["touched"])
    assert "open ('/dev/null'" in seen
    assert "import ('tabnanny'" in seen
    assert "exec (<code object <module>" in seen


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_the_reason_and_touches_nothing_else(results: dict[str, Any], name: str) -> None:
    result = results[name]
    if CASES[name].says:
        assert result["said"].startswith("CheckpointDamaged: "), result["said"]
        assert re.search(CASES[name].says, result["said"], re.DOTALL), result["said"]
        assert len(result["said"]) < 1000
    else:
        assert result["said"] == ""
    assert result["touched"] == []
    assert result["grown_kib"] < (300 << 10 if any(word in name for word in LARGE) else 16 << 10)


# ------------------------------------------------------------------ anything else

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["t", "I32", "F64", "list", "tuple", "int_dict", "__metadata__", 0, 1, 2, 3, 24, 2**63, -1]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


def places(found: Any) -> list[tuple[Any, Any]]:
    """Every container inside `found` with every key of it."""
    keys = list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    return [(found, key) for key in keys] + [place for key in keys for place in places(found[key])]


@st.composite
def changed(draw: st.DrawFn, start: Any) -> Any:
    """`start` in which something is replaced, removed or added."""
    found = copy.deepcopy(start)
    for _ in range(draw(st.integers(1, 3))):
        there = places(found)
        if not there:
            break
        container, key = draw(st.sampled_from(there))
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del container[key]
        elif action == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=3))] = draw(JSON)
        else:
            container[key] = draw(JSON)
    return found


RICH = {
    **body(),
    "aliases": {"a/b": "t"},
    "kinds": {"x": "list", "x/1": "int_dict", "y": "tuple"},
    "values": {
        "x/0": 1,
        "x/1/5": "z",
        "y": [1, 2.5, None],
        "big": {"int": hex(2**70)},
        "inf": {"float": "7ff" + "0" * 13},
    },
}


@settings(max_examples=400)
@given(changed(RICH))
def test_a_manifest_is_refused_or_is_the_one_text_of_what_it_says(found: Any) -> None:
    text = raw_manifest(found).decode()
    try:
        manifest = from_text(text, "here")
    except CheckpointDamaged:
        return
    assert to_text(manifest) == text


@pytest.mark.parametrize("version", [1, 3, 9999])
def test_a_manifest_of_another_version_is_not_called_damaged_if_it_is_whole(version: int) -> None:
    named = f"lockstep-checkpoint-{version}"
    whole = raw_manifest({**RICH, "more": 0}).decode().replace(FORMAT, named, 1)
    with pytest.raises(
        CheckpointError, match=rf"^here is of the format {named}, .* reads {FORMAT}: go on with"
    ) as other:
        from_text(whole, "here")
    assert not isinstance(other.value, CheckpointDamaged)
    ours = raw_manifest(RICH).decode()
    assert to_text(from_text(ours, "here")) == ours
    for text in (ours.replace(FORMAT, named, 1), whole.replace('"more":0', '"more":1', 1), whole[:-2]):
        with pytest.raises(CheckpointDamaged, match=r"^here is damaged: "):
            from_text(text, "here")


@settings(max_examples=400)
@given(changed({"__metadata__": {"starts": '{"t":[1,0]}'}, **HEADER, "u": {**HEADER["t"], "data_offsets": [24, 48]}}))
def test_a_header_is_refused_or_covers_its_file_once(found: Any) -> None:
    data = raw_file(found, DATA + DATA)
    try:
        stored = read_header(lambda offset, count: data[offset : offset + count], len(data), "here")
    except CheckpointDamaged:
        return
    ends = [offset + piece.nbytes for piece, offset in stored]
    assert [offset for _, offset in stored] == [len(data) - 48, *ends[:-1]]
    assert ends[-1] == len(data)


def test_the_samples_that_are_changed_are_good_ones() -> None:
    text = raw_manifest(RICH).decode()
    assert to_text(from_text(text, "here")) == text
