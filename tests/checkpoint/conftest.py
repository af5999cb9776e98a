"""What the tests of checkpoints share."""

import pytest
import servers


@pytest.fixture(scope="session")
def s3():
    """Return moto's server; each test writes under a name of its own."""
    with servers.s3() as server:
        yield server
