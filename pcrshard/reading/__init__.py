"""Read the prefixes of shards, with verified checksums, and their samples."""
