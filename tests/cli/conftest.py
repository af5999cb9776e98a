"""What the tests of the command line share."""

import pytest
from command_line import check_one_line

from pcrshard.cli.main import main


@pytest.fixture
def fails(capsys):
    """Run a command that must fail in one line with these words, without a traceback."""

    def check(*args, words=()):
        status = main([str(arg) for arg in args])
        check_one_line(status, capsys.readouterr().err, args[0], *words)

    return check
