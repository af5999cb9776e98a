"""What the Delta-DNN tables compare: each coder gives the ratio of a network (or of its difference
to an earlier one) and the network that comes back.
"""

import lzma

import numpy as np
import torch
import zstandard

from pcrshard.checkpoint import Precision
from pcrshard.checkpoint.bound_choice import one_delta
from pcrshard.checkpoint.tensors import words_of
from pcrshard.errorbound import FLOAT_TYPES, encode_planes

F32 = FLOAT_TYPES["float32"]
# As in pcrshard.checkpoint: smaller tensors and those of one dimension are kept bit for bit.
SMALLEST_LOSSY = 256


def raw_bytes(weights):
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def lossless(weights):
    """Ratios of LZMA and Zstd on the floats as they lie in memory."""
    data = b"".join(words_of(tensor).tobytes() for tensor in weights.values())
    packed = {
        "LZMA": lzma.compress(data),
        "Zstd": zstandard.ZstdCompressor(level=19).compress(data),
    }
    return {name: len(data) / len(payload) for name, payload in packed.items()}


def ours(weights, reference, bound):
    """(ratio, state) of a delta within a bound."""
    return one_delta({"model": weights}, {"model": reference}, Precision(weights=bound))


def _is_lossy(tensor):
    return tensor.is_floating_point() and tensor.dim() >= 2 and tensor.numel() >= SMALLEST_LOSSY


def sz3(weights, bound):
    """(ratio, state) of SZ3 at the same error of the same tensors; the others as byte planes.

    1 % of a tensor's deviation is the same error here and in :func:`ours`.
    """
    size = 0
    state = {}
    for name, tensor in weights.items():
        lattice = bound.lattice(words_of(tensor), F32) if _is_lossy(tensor) else None
        if lattice is None:
            size += len(encode_planes(words_of(tensor)))
            state[name] = tensor
            continue
        payload, restored = _sz3_of(tensor.numpy().ravel(), lattice.error_bound)
        size += payload
        state[name] = torch.from_numpy(restored.reshape(tensor.shape))
    return raw_bytes(weights) / size, {"model": state}


def _sz3_of(values, error_bound):
    from pysz import sz, szConfig, szErrorBoundMode

    config = szConfig()
    config.errorBoundMode = szErrorBoundMode.ABS
    config.absErrorBound = error_bound
    packed, _ = sz.compress(values, config)
    return packed.nbytes, sz.decompress(packed, values.dtype, values.shape)[0]


def _floats(weights):
    return np.concatenate(
        [tensor.numpy().ravel() for tensor in weights.values() if tensor.is_floating_point()]
    )


def similarity(weights, reference, points=400):
    """Figure 1: the line through (reference, weights), and SSIM with one window over all."""
    old = _floats(_parameters(reference)).astype(np.float64)
    new = _floats(_parameters(weights)).astype(np.float64)
    slope = np.polyfit(old, new, 1)[0]
    covariance = np.mean((old - old.mean()) * (new - new.mean()))
    spread = max(old.max(), new.max()) - min(old.min(), new.min())
    mean_term = (0.01 * spread) ** 2
    deviation_term = (0.03 * spread) ** 2
    ssim = (2 * old.mean() * new.mean() + mean_term) * (2 * covariance + deviation_term)
    ssim /= old.mean() ** 2 + new.mean() ** 2 + mean_term
    ssim /= old.var() + new.var() + deviation_term
    chosen = np.random.default_rng(0).choice(len(old), points)
    return {
        "slope": float(slope),
        "ssim": float(ssim),
        "moved": float(np.median(_moved(weights, reference))),
        "points": [[float(old[i]), float(new[i])] for i in chosen],
    }


def _parameters(weights):
    """Without the statistics of BatchNorm, which are no parameters and much larger."""
    return {name: tensor for name, tensor in weights.items() if "running_" not in name}


def _moved(weights, reference):
    """Deviation of the difference by that of the tensor, for each tensor of a lattice."""
    return [
        float((tensor - reference[name]).std() / tensor.std())
        for name, tensor in weights.items()
        if _is_lossy(tensor)
    ]
