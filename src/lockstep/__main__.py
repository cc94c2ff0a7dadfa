"""`python -m lockstep` is the `lockstep` command."""

from __future__ import annotations

from lockstep.launch import early_stop


def main() -> int:
    """The command of `sys.argv`; its exit code."""
    early_stop.listen()
    from lockstep.cli import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
