"""Collectives written from send and receive alone, one page for each algorithm, with what each of them costs."""
