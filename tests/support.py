"""What tests of several rooms need."""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import subprocess
import time

import pytest

from pcrshard import EncodeOptions, encode
from pcrshard.encoding.resume_journal import JOURNAL

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_tool(*command: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run djpeg or jpegtran on bytes."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} IS NOT INSTALLED: apt-get install libjpeg-turbo-progs")
    return subprocess.run(command, input=data, capture_output=True, check=False)


def read_all(folder):
    """Digest of every file of a dataset but the journal, whose order in time is its own."""
    return {
        p.name: digest(p.read_bytes()) for p in pathlib.Path(folder).iterdir() if p.name != JOURNAL
    }


def digest(data):
    """What of a file is compared: a failed comparison of its bytes would fill the log."""
    return len(data), hashlib.sha256(data).hexdigest()


def run_encode(src, dst, **options):
    how = {
        name: options.pop(name)
        for name in ("workers", "resume", "progress", "executor")
        if name in options
    }
    return encode(str(src), str(dst), EncodeOptions(**options), **{"workers": 1} | how)


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
