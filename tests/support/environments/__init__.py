"""Some directories and stores for a test: real data directories, one shard by itself, or all of it simulated."""
