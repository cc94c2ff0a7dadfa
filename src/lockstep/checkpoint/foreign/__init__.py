"""Checkpoints of other libraries, read without running any of what they hold, and written for them."""
