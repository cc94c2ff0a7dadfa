"""What a lesson did, as a text that is the same for every run of it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.learn.events import Event, screens, words


def trace(ranks: Sequence[Sequence[Event]]) -> str:
    """The same for every run of the lesson: what each rank did, without times and what rounding makes of them."""
    lines: list[str] = []
    for number, screen in enumerate(screens(ranks), 1):
        lines.append(f"{number}. {screen.title}")
        for rank in range(len(ranks)):
            lines += [f"  rank {rank}  {_lasting(event)}" for event in screen.events if event.rank == rank]
    return "\n".join(lines) + "\n"


def _lasting(event: Event) -> str:
    is_measured = event.name.endswith("_ms") or event.name.startswith("difference_")
    return f"{event.name} was measured" if is_measured else words(event)
