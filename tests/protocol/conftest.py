"""A round that is open, for tests of messages."""

import pytest

from tests.federation import Federation
from tests.protocol.messages import with_norm
from thinwire.protocol import Method
from thinwire.protocol.round import Round


@pytest.fixture
def opened():
    """An open round, and the upload of client 0."""
    federation = Federation(Method(), with_norm())
    federation.round((0, 1))
    plan = Round.open(federation.contract, federation.server).plan
    federation.download(0)
    return federation, plan, federation.upload(0)
