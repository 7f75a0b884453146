"""What holds for every test: no time limits inside hypothesis, since a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("vismoe", deadline=None)
settings.load_profile("vismoe")
