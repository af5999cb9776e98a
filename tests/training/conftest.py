"""A dataset of numbered samples that the tests of this folder share."""

import pytest
from numbered import numbered, write


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """10 shards of 6; ``cls`` is the sample's id. Read only."""
    return write(tmp_path_factory.mktemp("numbered"), numbered(60))
