"""`python -m lockstep` is the `lockstep` command."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted has but a traceback to show

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
