"""Simulate a training epoch on a hypothetical cluster."""
