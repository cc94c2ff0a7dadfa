"""Watches what ranks say to each other, and never changes a number of it."""
