"""Names under which an extended model keeps what `extend` adds to it."""

IMPLEMENTATION = "isentrope"  # of attention, as `config._attn_implementation` names it
LAYER = "isentrope"  # attribute of an attention module: its `Layer`; part of the names of learned weights
CONFIG_KEY = "isentrope"  # in config.json and adapter_config.json: the recipe, the backend and what was measured
EXTENSION = "_isentrope"  # attribute of a model: how to undo `extend`
SHARED_POSITION = "isentrope_position"  # attribute of a model: a learned position method that all layers share
PAGED_STEP = "isentrope_step"  # argument of an attention function: the pass over a paged cache that it belongs to
