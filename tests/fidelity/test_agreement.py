"""What all ranks agree on, without waiting for each other."""

import json
import time

import pytest
from support import run_ranks

from pcrshard.fidelity.agreement import Agreement

RANKS = """
import datetime, json, sys, time
import torch, torch.distributed as dist
from pcrshard import BandwidthTuner, ScanLevel
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
steps = [{steps}][rank]
level = ScanLevel()
tuner = BandwidthTuner(level, [100, 200, 400, 800, 1000, 1010], window=15, ahead=20)
scans = []
for step in range(steps):
    # Rank 1 has a link that carries 400 bytes a sample while a step computes; rank 0 never waits.
    size = tuner.sizes[-1 if level.value == "full" else level.value - 1]
    waited = max(0.0, 0.02 * (size / 400 - 1)) if rank else 0.0
    scans.append(tuner.record(waited, 0.02, 10))
    if {together}:
        dist.all_reduce(torch.zeros(1))  # as gradients are
    time.sleep(0.001)
open({out!r} + str(rank), "w").write(json.dumps(scans))
{end}
"""


def scans_of(tmp_path, steps, *, together, end="dist.destroy_process_group()"):
    """The scans of each step on two ranks."""
    out = str(tmp_path / "rank")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(steps=steps, together=together, out=out, end=end))
    begun = time.monotonic()
    run_ranks(script)
    assert time.monotonic() - begun < 120
    return [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]


def test_alone_a_number_is_agreed_at_once():
    """Without torch.distributed nothing is exchanged."""
    agreement = Agreement()
    assert [agreement.lowest(number) for number in (7, 3, 9)] == [7, 3, 9]


def test_all_ranks_read_what_the_slowest_link_carries(tmp_path):
    """Rank 0 alone would stay at full; both settle where rank 1 no longer waits."""
    fast, slow = scans_of(tmp_path, "600, 600", together=True)
    assert fast[-100:].count(3) > 60
    same = sum(a == b for a, b in zip(fast, slow, strict=True))
    assert same > 560, "they follow within a few steps"
    assert {*fast[100:]} <= {2, 3, 4, 5}, "never back to full"


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        pytest.param("400, 120", "dist.destroy_process_group()", marks=pytest.mark.long),
        ("60, 400", ""),
        pytest.param("300, 0", "dist.destroy_process_group()", marks=pytest.mark.long),
    ],
)
def test_ranks_with_other_numbers_of_steps_never_wait(tmp_path, steps, end):
    """A rank that is done holds nobody up, during the loop and at the end of the process."""
    scans = scans_of(tmp_path, steps, together=False, end=end)
    assert [len(taken) for taken in scans] == [int(count) for count in steps.split(",")]
