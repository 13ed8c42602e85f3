"""Advantages: from the rewards of a step to one number for every token."""

from .compute import compute_advantages
from .inputs import AdvantageInputs

__all__ = ["AdvantageInputs", "compute_advantages"]
