"""`python -m lockstep` is the `lockstep` command."""

from __future__ import annotations

import signal

from lockstep.launch.early_stop import leave_at_once


def main() -> int:
    """The command of `sys.argv`; its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    from lockstep.cli import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
