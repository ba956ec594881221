"""Building blocks of a decoder. Each takes its shard; all shards are of size one for now."""
