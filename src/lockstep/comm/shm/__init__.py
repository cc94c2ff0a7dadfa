"""Memory that all ranks of one host see, and what they do in it. `comm/shm_transport.py` is the door."""
