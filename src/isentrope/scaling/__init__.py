"""Predict time and memory of a prefill spread over many devices, from measured kernel rates and link bandwidths."""
