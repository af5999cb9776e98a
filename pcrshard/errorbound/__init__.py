"""Error-bounded quantization: bounds, integer lattices, and lossless coders for the codes."""

from .bounds import (
    MEDIAN_OF_NORMAL,
    Absolute,
    Bound,
    PointwiseRelative,
    RelativeStd,
    check_fraction,
    check_positive,
)
from .byte_codes import (
    compress,
    decode_planes,
    decompress,
    encode_planes,
)
from .float_types import FLOAT_TYPES, FloatType, Words
from .integer_codes import decode_integers, encode_integers
from .lattice import (
    Codes,
    Lattice,
    LinearLattice,
    LogLattice,
    lattice_from,
)
from .quantize import Quantized, dequantize, quantize

__all__ = [
    "FLOAT_TYPES",
    "MEDIAN_OF_NORMAL",
    "Absolute",
    "Bound",
    "Codes",
    "FloatType",
    "Lattice",
    "LinearLattice",
    "LogLattice",
    "PointwiseRelative",
    "Quantized",
    "RelativeStd",
    "Words",
    "check_fraction",
    "check_positive",
    "compress",
    "decode_integers",
    "decode_planes",
    "decompress",
    "dequantize",
    "encode_integers",
    "encode_planes",
    "lattice_from",
    "quantize",
]
