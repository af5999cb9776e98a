"""Neighbors, one module each, the only one that imports it."""
