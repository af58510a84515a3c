"""What layers share in a pass: not with another thread's, nor with layers unlike them."""

from __future__ import annotations

import copy
import threading

import torch

import isentrope as ise
from isentrope.hf import decoding
from isentrope.hf.layer import LayerCall, get_layer
from isentrope.hf.layout_cache import LayoutCache
from tests.fixtures.models import llama


def test_a_server_s_pass_is_paged_in_its_own_thread_alone():
    layouts, seen = LayoutCache(2), []

    def serve():
        layouts.set_paged(True)
        seen.append(layouts.paged)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert seen == [True]
    layouts.paged_threads.discard(threading.get_ident())  # an ended thread's number may be given again
    assert not layouts.paged
    layouts.set_paged(True)
    assert layouts.paged
    layouts.set_paged(False)
    assert not layouts.paged
    assert not copy.deepcopy(layouts).paged


def test_a_launch_is_for_tensors_like_those_it_was_prepared_with():
    """Layers of one recipe may have other numbers of heads, and caches other orders in memory."""
    layer = get_layer(ise.extend(llama(), "rerope:window=16").model.layers[0].self_attn)
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16)
    calls = [LayerCall(layer, q, keys, k) for keys in (k, k.clone(), k.transpose(1, 2).contiguous().transpose(1, 2))]
    first, like_it, other_order = (decoding._make_key(layer, call) for call in calls)
    assert first == like_it != other_order
    assert decoding._make_key(layer, LayerCall(layer, q.double(), k, k)) != first
