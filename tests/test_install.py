"""What installing does, apart from copying files."""

import subprocess
import sys

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
