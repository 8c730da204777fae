"""Settings shared by all tests."""

from hypothesis import settings

# Timings on shared machines say nothing about the code: speed is measured in `kvloom bench`.
settings.register_profile("kvloom", deadline=None)
settings.load_profile("kvloom")
