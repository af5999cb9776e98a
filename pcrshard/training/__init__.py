"""Datasets, epoch order, and the loader that makes batches."""
