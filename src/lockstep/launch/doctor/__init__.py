"""`lockstep doctor`: looks at machines and ranks before a run does, and names what would fail, with the remedy."""
