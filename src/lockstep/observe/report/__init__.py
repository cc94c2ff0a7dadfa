"""The picture of a run: its folder becomes one document, and that a page, live or as one file."""
