"""Settings for all tests: examples found by hypothesis are the same on every machine and have no time limit."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("thinwire", deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")

os.environ["THINWIRE_PROBE"] = "off"  # which way is the fastest depends on the machine; tests of the race turn it on


@pytest.fixture
def three_cores():
    """Torch may use three cores, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
