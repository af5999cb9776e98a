"""Who reads what and when, and batches of it."""
