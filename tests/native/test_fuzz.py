"""Short runs of the fuzzing harness and of the threads, under the sanitizers."""

import os
import shutil
import subprocess
import sys

import pytest
from support import ROOT


def fuzz(work, seconds, *folders, **variables):
    """Run libFuzzer with ASan and UBSan; it must find nothing."""
    if shutil.which("clang") is None:
        pytest.skip("no clang: install clang and its compiler-rt to fuzz")
    command = [str(ROOT / "fuzz" / "run.sh"), str(seconds), *map(str, folders)]
    # A timeout by the clock says nothing on a loaded machine.
    environment = {**os.environ, "FUZZ_WORK": str(work), "FUZZ_TIMEOUT": "300", **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "libclang_rt.fuzzer" in result.stderr and "cannot find" in result.stderr:
        pytest.skip("clang has no libFuzzer runtime: install libclang-rt-14-dev")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "stat::number_of_executed_units" in result.stderr
    assert not list((work / "findings").iterdir())


@pytest.mark.parametrize(
    ("every", "seconds", "flags"), [(40, 2, "-O0"), pytest.param(1, 30, "", marks=pytest.mark.long)]
)
def test_fuzzing_finds_nothing(odd_files, tmp_path, every, seconds, flags):
    """JPEGs decode the same in every way, seeded with odd files: all of them only in long runs."""
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for path in odd_files[::every]:
        shutil.copy(path, seeds)
    fuzz(tmp_path, seconds, seeds, CFLAGS=flags)


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.long)])
def test_fuzzing_of_tables_finds_nothing(tmp_path, seconds):
    """Tables of pieces and patches of weights that anyone may have written stay in their memory."""
    fuzz(tmp_path, seconds, FUZZ_TARGET="fuzz_tables")


@pytest.mark.long
def test_threads_do_not_race(odd_files):
    """Batches, transcoding and scattered reads by four threads at once, under ThreadSanitizer."""
    files = [str(path) for path in odd_files if path.name.startswith("valid-")][::10]
    command = [str(ROOT / "fuzz" / "threads.sh"), *files]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "libtsan" in result.stderr and "cannot find" in result.stderr:
        pytest.skip("gcc has no ThreadSanitizer: install libtsan2")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert f"{len(files)} files by 4 threads: no race" in result.stdout
