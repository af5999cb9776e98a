"""The one road to the bytes: a shard's prefix, loaded sound, and its samples."""
