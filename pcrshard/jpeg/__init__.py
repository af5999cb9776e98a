"""JPEG: parsing markers, splitting and joining scans, and decoding pixels."""
