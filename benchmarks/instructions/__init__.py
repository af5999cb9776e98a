"""Instructions of the main operations, counted: the gate for speed."""
