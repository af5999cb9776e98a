"""Images and tars to shards."""
