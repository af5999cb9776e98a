"""Clusters by simulation: what an epoch would take on machines that are not at hand."""
