"""The device of a task, and the precision that it computes in."""

import os

import torch

PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def choose_device():
    """Return this task's GPU, after making it the current one, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    # SLURM may show each task its own GPU (--gpus-per-task), which is then number 0.
    device = torch.device("cuda", local if torch.cuda.device_count() > 1 else 0)
    # Without it NCCL, pinned memory and .cuda() of every task would take GPU 0.
    torch.cuda.set_device(device)
    return device


def precision_of(asked, device):
    """Return fp32, fp16 or bf16; ``auto`` chooses by the device."""
    if asked == "auto":
        return best_precision(device.type == "cuda" and torch.cuda.get_device_capability(device))
    if asked not in PRECISIONS:
        raise ValueError(f"expected precision=auto or one of {list(PRECISIONS)}, got {asked!r}")
    return asked


def best_precision(capability):
    """Return the precision for a GPU's compute capability; ``False`` is a CPU.

    >>> best_precision((7, 0)), best_precision((8, 0)), best_precision((9, 0))  # V100, A100, H100
    ('fp16', 'bf16', 'bf16')
    >>> best_precision((6, 1)), best_precision(False)  # no tensor cores
    ('fp32', 'fp32')
    """
    if not capability or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp16"
