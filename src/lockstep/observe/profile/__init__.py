"""Where the time of a run goes: recorded per rank and step, compared over ranks, with what would make it faster."""
