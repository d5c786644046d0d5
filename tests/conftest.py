"""Settings that all tests share."""

from hypothesis import settings

# A shared machine is slow at times, which is no fault of an example; a hang is pytest-timeout's.
settings.register_profile("kettle", deadline=None, max_examples=50)
settings.load_profile("kettle")
