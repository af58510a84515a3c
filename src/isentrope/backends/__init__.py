"""Backends: how attention is computed. Each module has `refusal(calls)` and `attend(calls, need_lse)`."""
