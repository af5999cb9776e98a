"""Short runs of the fuzzing harness and of the threads, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

SECONDS = 2


def test_fuzzing_smoke_run(odd_files: list[Path], tmp_path: Path) -> None:
    """Some seconds of libFuzzer with ASan and UBSan from the odd files find nothing."""
    if shutil.which("clang") is None:
        pytest.skip("no clang: install clang and its compiler-rt to fuzz")
    command = [str(ROOT / "fuzz" / "run.sh"), str(SECONDS), str(odd_files[0].parent)]
    environment = {**os.environ, "FUZZ_WORK": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "libclang_rt.fuzzer" in result.stderr and "cannot find" in result.stderr:
        pytest.skip("clang has no libFuzzer runtime: install libclang-rt-14-dev")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "stat::number_of_executed_units" in result.stderr
    assert not list((tmp_path / "findings").iterdir())


@pytest.mark.long
def test_threads_do_not_race(odd_files: list[Path]) -> None:
    """Batches, transcoding and scattered reads by four threads at once, under ThreadSanitizer."""
    files = [str(path) for path in odd_files if path.name.startswith("valid-")][::10]
    command = [str(ROOT / "fuzz" / "threads.sh"), *files]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "libtsan" in result.stderr and "cannot find" in result.stderr:
        pytest.skip("gcc has no ThreadSanitizer: install libtsan2")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert f"{len(files)} files by 4 threads: no race" in result.stdout
