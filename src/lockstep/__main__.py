"""`python -m lockstep` is the `lockstep` command."""

from lockstep.cli import main

raise SystemExit(main())
