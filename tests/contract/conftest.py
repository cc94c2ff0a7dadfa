"""Tables of cases learn which of them this session asks for."""

from __future__ import annotations

import pytest

from case_table import LIMIT_S, CaseTable


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        table = getattr(getattr(item, "module", None), "CASES", None)
        arguments = item.callspec.params if hasattr(item, "callspec") else {}
        if isinstance(table, CaseTable) and arguments.keys() >= {"name", "world_size"}:
            table.ask_for(arguments["name"], arguments["world_size"])
            item.add_marker(pytest.mark.limit_s(LIMIT_S + 10))  # of the first, which runs them all
