"""SPEC.md in code: bytes in, bytes out, no I/O."""
