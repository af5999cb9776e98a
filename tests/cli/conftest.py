"""What the tests of the command line share."""

import json

import pytest
from command_line import check_one_line

from pcrshard.cli.main import main


@pytest.fixture
def cli(capsys):
    """Run a command in this process: its status, its output (parsed for --json), its errors."""

    def run(*words):
        try:
            status = main(list(map(str, words)))
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in words and out else out, err

    return run


@pytest.fixture
def fails(cli):
    """Run a command that must fail in one line with these words, without a traceback."""

    def check(*args, words=()):
        status, _, err = cli(*args)
        check_one_line(status, err, args[0], *words)

    return check
