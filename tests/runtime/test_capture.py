"""Recording of CUDA graphs in several threads."""

from __future__ import annotations

import threading
import time

import torch

from torchmdnet2.runtime.capture import exclusive_capture


def test_threads_take_turns(monkeypatch):
    """A stand-in for torch.cuda.graph, which fails while another thread records, counts who is inside."""
    inside, most = [], []

    class Recording:
        def __init__(self, graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local"
            self.name = graph

        def __enter__(self):
            inside.append(self.name)
            most.append(len(inside))
            time.sleep(0.01)

        def __exit__(self, *error):
            inside.remove(self.name)

    monkeypatch.setattr(torch.cuda, "graph", Recording)

    def record(name):
        for _ in range(3):
            with exclusive_capture(name, None):
                pass

    threads = [threading.Thread(target=record, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 12
