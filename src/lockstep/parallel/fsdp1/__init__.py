"""What stands behind FullyShardedDataParallel: torch's older names, understood."""
