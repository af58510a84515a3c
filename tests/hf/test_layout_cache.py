"""Passes of several threads over one model."""

from __future__ import annotations

import copy
import threading

from isentrope.hf.layout_cache import LayoutCache


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
