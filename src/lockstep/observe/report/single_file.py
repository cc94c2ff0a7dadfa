"""A page as one HTML file: markup, style, script and data together, and nothing from anywhere else.

The data stands in the file as JSON that no parser of HTML can read as markup, and the script builds elements from text
only. A policy in the file's head admits this style and this script by their hashes; whatever else got in would not run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

_UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


def single_file(
    *, title: str, body: str, style: str, script: str, document: Mapping[str, Any], may_fetch: bool = False
) -> str:
    """The page, as pure ASCII. body: markup, not data. may_fetch: from the server that it came from, and only there."""
    whole = "(() => {\n'use strict';\n" + script + "})();\n"
    return Template(asset("single_file.html", __file__)).substitute(
        title=_ascii(html.escape(title)),
        policy=_policy(style, whole, may_fetch),
        style=style,
        script=whole,
        body=_ascii(body),
        document=to_json(document),
    )


def asset(name: str, module: str) -> str:
    """A file of ours that lies beside that of `module`."""
    return Path(module).with_name(name).read_text(encoding="ascii")


def to_json(document: Mapping[str, Any]) -> str:
    """A document as JSON that is safe inside a <script>: no markup, ASCII only; null for what is not finite."""
    finite = _finite(document)
    return json.dumps(finite, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _finite(value: Any) -> Any:
    """JSON has no NaN, and a loss may be one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _policy(style: str, script: str, may_fetch: bool) -> str:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    connect = "connect-src 'self'; " if may_fetch else ""
    return (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data:; {connect}"
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _ascii(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode()
