"""Environments that come with gymloop: ``entrypoint: gymloop.gym.environments:SlidingPuzzle`` in a recipe."""

from gymloop.gym.calculator import Calculator
from gymloop.gym.environments.maths import Math
from gymloop.gym.environments.sliding_puzzle import SlidingPuzzle

__all__ = ["Calculator", "Math", "SlidingPuzzle"]
