"""Compress the activations that autograd saves for backward, within an error bound."""

from ..errorbound import Absolute, RelativeStd
from .compressor import Compressor, compress_activations
from .measurements import gradient_noise, peak_memory
from .noise import GradientNoise
from .options import ActivationOptions
from .report import Layer, Report

__all__ = [
    "Absolute",
    "ActivationOptions",
    "Compressor",
    "GradientNoise",
    "Layer",
    "RelativeStd",
    "Report",
    "compress_activations",
    "gradient_noise",
    "peak_memory",
]
