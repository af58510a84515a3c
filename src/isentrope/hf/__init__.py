"""Any transformers model under a recipe."""

from isentrope.utils.extras import name_missing_extras

with name_missing_extras():
    from isentrope.hf.describe import describe
    from isentrope.hf.export import export
    from isentrope.hf.extend import extend, extended, restore
    from isentrope.hf.loading import load
    from isentrope.hf.streaming_cache import StreamingCache

__all__ = ["StreamingCache", "describe", "export", "extend", "extended", "load", "restore"]
