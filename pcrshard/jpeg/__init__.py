"""JPEG: where its parts are, taken apart and together, and its pixels."""
