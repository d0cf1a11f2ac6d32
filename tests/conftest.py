"""Settings for all tests: examples found by hypothesis are the same on every machine and have no time limit."""

from hypothesis import settings

settings.register_profile("thinwire", deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")
