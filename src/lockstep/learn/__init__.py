"""What lessons and puzzles are made of: a stage for the ranks, a record of what they did, and ways to look at it."""
