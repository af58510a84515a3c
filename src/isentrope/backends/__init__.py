"""Backends: how attention is computed. Each implements `protocol.Backend`; `isentrope.dispatch` chooses among them."""
