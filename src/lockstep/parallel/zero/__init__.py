"""What stands behind ShardedOptimizer: which elements a rank owns, steps and gathers."""
