"""Hypothesis here searches for wrong numbers; how long an example takes depends on who else uses the machine."""

from hypothesis import settings

settings.register_profile("algorithms", deadline=None)
settings.load_profile("algorithms")
