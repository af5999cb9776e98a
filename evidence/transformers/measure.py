"""Transformers with compressed activations: measured once, by the programs of commit 755c9cf.

``python -m benchmarks activation`` measures what the tensors of a vision transformer take.
"""

KEPT = ("runs", "ratios")


def measure(_lab, _parts=()):
    """Nothing is measured again."""
