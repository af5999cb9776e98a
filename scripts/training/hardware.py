"""Which device a task has, and which numbers it computes with."""

import os

import torch

PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def gpu_of(local, visible):
    """Return the index of a task's GPU among its visible GPUs.

    SLURM may show each task its own GPU (--gpus-per-task), which is then number 0, or all GPUs of
    the node to all its tasks; CUDA_VISIBLE_DEVICES is counted in ``visible`` already.

    >>> gpu_of(3, 1), gpu_of(3, 4)
    (0, 3)
    """
    if visible == 1:
        return 0
    if local >= visible:
        raise ValueError(f"expected a GPU for each task of a node, got {visible} for task {local}")
    return local


def choose_device(environment=os.environ):
    """This task's GPU, made the current one, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))
    device = torch.device("cuda", gpu_of(local, torch.cuda.device_count()))
    # Without it NCCL, pinned memory and .cuda() of every task would take GPU 0.
    torch.cuda.set_device(device)
    return device


def precision_of(asked, device):
    """fp32, fp16 or bf16; ``auto`` is what the device is made for."""
    if asked == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return best_precision(capability)
    if asked not in PRECISIONS:
        raise ValueError(f"expected precision=auto or one of {list(PRECISIONS)}, got {asked!r}")
    return asked


def best_precision(capability):
    """The precision of a GPU by its compute capability; ``None`` is a CPU.

    >>> best_precision((7, 0)), best_precision((8, 0)), best_precision((9, 0))  # V100, A100, H100
    ('fp16', 'bf16', 'bf16')
    >>> best_precision((6, 1)), best_precision(None)  # no tensor cores
    ('fp32', 'fp32')
    """
    if capability is None or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp16"
