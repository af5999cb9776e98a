"""Is a dataset what a user believes it is: classes, duplicates across splits, shortcuts."""
