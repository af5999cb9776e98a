"""Compress the activations that autograd saves for backward, within an error bound."""

from ..errorbound import Absolute, RelativeStd
from .compressor import Compressor, compress_activations
from .measurements import Fit, find_batch_size, gradient_noise, peak_memory
from .noise_bound import GradientNoise
from .options import ActivationOptions
from .report import Layer, Report

__all__ = [
    "Absolute",
    "ActivationOptions",
    "Compressor",
    "Fit",
    "GradientNoise",
    "Layer",
    "RelativeStd",
    "Report",
    "compress_activations",
    "find_batch_size",
    "gradient_noise",
    "peak_memory",
]
