"""A crafted file is an error or a small job, never gigabytes and minutes."""

import json
import os
import subprocess
import sys

import hostile
import hostile_campaign
import pytest
from support import ROOT

MAX_MEGABYTES = 600
# Ten are allowed; machines of tests are shared, and take up to twice as long.
MAX_SECONDS = 20
# What is legal, only large.
ALLOWED = {
    "arithmetic_allowed",
    "arithmetic_allowed_scans",
    "decode_dense",
    "encode_dense",
    "encode_flat",
    "flat_baseline",
    "index_of_unknown_lists",
    "png_allowed",
    *(name for name in hostile.CASES if name.startswith("shard_of_") and "chroma" not in name),
} - {"shard_of_many_samples"}


# Shards of thousands of expensive images and pictures of many pixels take seconds each; one of a
# kind is enough every day.
EVERY_DAY = {"shard_of_many_samples", "flat_huge", "arithmetic_few_bytes"}
EXPENSIVE = ("shard_", "flat_", "arithmetic_", "dense")


def _is_long(name):
    return name.startswith(EXPENSIVE) and name not in EVERY_DAY


CASES = [
    pytest.param(name, marks=[pytest.mark.long] if _is_long(name) else []) for name in hostile.CASES
]


@pytest.fixture(scope="module")
def costs(request):
    """What each case of this run took, measured in a process that never grew before it."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.originalname == "test_less_than_a_megabyte_never_costs_gigabytes"
    ]
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hostile.py"), *names],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120 * len(names),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_less_than_a_megabyte_never_costs_gigabytes(name, costs):
    """An input below 1 MB takes at most 600 MB, and seconds of CPU; a refusal says why."""
    took = costs[name]
    print(f"{took['megabytes']:.0f} MB, {took['seconds']:.1f} s, {took['error']} {took['text']}")
    assert took["megabytes"] <= MAX_MEGABYTES, took
    assert took["seconds"] <= MAX_SECONDS, took
    assert took["refused"] or (name in ALLOWED and not took["error"]), took


CAMPAIGN = {"jpegs": 6000, "shards": 6000, "indexes": 4000, "states": 4000, "tars": 2000}


@pytest.mark.parametrize("kind", hostile_campaign.KINDS)
@pytest.mark.parametrize("share", [50, pytest.param(1, marks=pytest.mark.long)])
def test_thousands_of_damaged_inputs(kind, share):
    """Each is refused by an error of the library's, or read; none takes gigabytes or minutes."""
    count = CAMPAIGN[kind] // share
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hostile_campaign.py"), kind, str(count), str(share)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    took = json.loads(result.stdout)
    print(kind, result.stdout)
    assert took["findings"] == []
    assert min(took["refused"], took["accepted"]) > 0, took
    assert took["refused"] + took["accepted"] == count
    assert took["megabytes"] <= MAX_MEGABYTES, took
    assert took["slowest"] <= MAX_SECONDS, took
