"""Attention over several processes that share a sequence."""

from isentrope.parallel.context import ContextParallel
from isentrope.parallel.ulysses import Ulysses

__all__ = ["ContextParallel", "Ulysses"]
