"""The language of attention calls: regions, layouts, rotations and the call that a backend computes."""
