"""Any transformers model under a recipe."""

from isentrope.hf.cache import StreamingCache
from isentrope.hf.describe import describe
from isentrope.hf.extend import extend, extended, load, restore

__all__ = ["StreamingCache", "describe", "extend", "extended", "load", "restore"]
