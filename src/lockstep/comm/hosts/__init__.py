"""The collectives of ranks on several hosts, one leader for each. `comm/hierarchical.py` is the door."""
