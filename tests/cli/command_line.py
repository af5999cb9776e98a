"""The command line as a user runs it, for the tests of this folder."""

import subprocess
import sys

RUN = [
    sys.executable,
    "-W",
    "error",
    "-c",
    "import sys; from pcrshard_command import main; sys.exit(main())",
]


def run(*args, **options):
    """Run a command in a process of its own."""
    command = [*RUN, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def check_one_line(status, err, *words):
    """An error is one line with these words, without a traceback, after what encode said before."""
    err = "".join(line for line in err.splitlines(True) if not line.startswith("writing "))
    assert status == 1
    assert err.count("\n") == 1, err
    assert err.startswith("pcrshard ")
    assert all(word in err for word in words), err
