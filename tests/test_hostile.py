"""A crafted file is an error or a small job, never gigabytes and minutes."""

import json

import hostile
import pytest
from support import ROOT, run_python

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
# Shards of thousands of expensive images take seconds each.
CASES = [
    pytest.param(name, marks=pytest.mark.long if name.endswith(tuple(hostile.USES)) else ())
    for name in hostile.CASES
]


def run_program(name, *words):
    """The rows that a program of this folder prints."""
    said = run_python(ROOT / "tests" / name, *words)
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="module")
def costs(request):
    """What each case of this run took, measured in a process that never grew before it."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.originalname == "test_less_than_a_megabyte_never_costs_gigabytes"
    ]
    return {row["name"]: row for row in run_program("hostile.py", *names)}


def check_costs(took):
    print(took)
    assert took["megabytes"] <= MAX_MEGABYTES
    assert took["seconds"] <= MAX_SECONDS


@pytest.mark.parametrize("name", CASES)
def test_less_than_a_megabyte_never_costs_gigabytes(name, costs):
    """An input below 1 MB takes at most 600 MB, and seconds of CPU; a refusal says why."""
    took = costs[name]
    check_costs(took)
    assert took["refused"] or (name in ALLOWED and not took["error"])


CAMPAIGN = {"jpegs": 6000, "shards": 6000, "indexes": 4000, "states": 4000, "tars": 2000}


@pytest.mark.parametrize("share", [50, pytest.param(1, marks=pytest.mark.long)])
def test_thousands_of_damaged_inputs(share):
    """Each is refused by an error of the library's, or read; none takes gigabytes or minutes."""
    counts = [f"{kind}={count // share}" for kind, count in CAMPAIGN.items()]
    for took in run_program("hostile_campaign.py", *counts):
        check_costs(took)
        assert took["findings"] == []
        assert min(took["refused"], took["accepted"]) > 0
        assert took["refused"] + took["accepted"] == CAMPAIGN[took["kind"]] // share
