"""What installing does, apart from copying files."""

import shutil
import subprocess
import sys

import pytest
from support import ROOT


def test_windows_is_refused_with_the_reason():
    """On Windows, pip stops with a sentence rather than a compiler's messages."""
    code = "import sys; sys.platform = 'win32'; exec(open('setup.py').read())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "does not run on Windows" in result.stderr
    assert "WSL" in result.stderr


def test_the_core_compiles_without_vector_kernels():
    """Where there is neither AVX2 nor NEON, as on RISC-V and POWER, pip builds plain C."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    flags = ["-Wall", "-Werror", "-fsyntax-only", "-DPCR_AVX2_H", "-DPCR_HAVE_VECTORS=0"]
    sources = (ROOT / "pcrshard/native/src").glob("*.c")
    subprocess.run([compiler, "-std=c11", *flags, *sources], check=True)
