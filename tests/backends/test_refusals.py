"""Backends refuse what they cannot compute; they do not fall back."""

import torch

from tests.fixtures.errors import K, Q, call, refused, x


def test_sdpa_refuses_wide_values():
    v = x(2, 2, 6, 1536)
    refused(lambda: call(v=v, backend="sdpa"), "'sdpa'", "up to 256", "1536", "'chunked'")
    assert call(v=v).shape == (2, 4, 6, 1536)
    _, aux = call(v=v, return_lse=True)
    assert aux.backend == "dense"


def test_flex_refuses_gradients_on_a_cpu():
    for which in ("q", "k", "v"):
        tensors = {"q": Q.clone(), "k": K.clone(), "v": K.clone()}
        tensors[which].requires_grad_()
        refused(lambda tensors=tensors: call(**tensors, backend="flex"), "'flex'", "no backward on a CPU", "'chunked'")
        with torch.no_grad():
            assert call(**tensors, backend="flex").shape == Q.shape


def test_flex_refuses_long_rows_on_a_cpu():
    q = x(1, 1, 4097, 8)
    refused(lambda: call(q, q, q, backend="flex"), "'flex'", "4096", "4097", "'sdpa'")
