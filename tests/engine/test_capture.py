"""Recording of CUDA graphs: in several threads, compared with the launches, with errors that say why."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from torchmdnet2.engine.graph import CudaGraph, NotCapturable, ReplayDiffers, exclusive_capture


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


class FakeGraph:
    """Replays a function in the place of recorded launches."""

    function = staticmethod(lambda: None)

    def replay(self):
        self.function()


@pytest.fixture
def no_gpu(monkeypatch):
    """What `CudaGraph.record` asks CUDA for, on a CPU: launches run at once, also those that would be recorded."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "Stream": lambda *given, **options: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda *given, **options: contextlib.nullcontext(),
        "CUDAGraph": FakeGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("torchmdnet2.core.devices._STREAMS", threading.local())


def test_a_recording_leaves_inputs_as_they_were(no_gpu, monkeypatch):
    state = torch.zeros(3)
    monkeypatch.setattr(FakeGraph, "function", lambda self: state.add_(1))
    graph = CudaGraph.record(lambda: state.add_(1), torch.device("cpu"), [state], changes_inputs=True)
    assert state.tolist() == [0, 0, 0]
    graph.replay()
    assert state.tolist() == [1, 1, 1]


@pytest.mark.parametrize("error", [0.0, 1e-6, 1.0])
def test_a_replay_must_give_what_the_launches_gave(no_gpu, monkeypatch, error):
    out = torch.zeros(3)
    monkeypatch.setattr(FakeGraph, "function", lambda self: out.fill_(2 + error))

    def record(**options):
        return CudaGraph.record(lambda: out.fill_(2), torch.device("cpu"), [out], **options)

    with contextlib.nullcontext() if not error else pytest.raises(ReplayDiffers, match="gives other numbers"):
        record()
    with contextlib.nullcontext() if error < 1 else pytest.raises(ReplayDiffers):
        record(agree=lambda launched: torch.allclose(launched[0], out))


def test_a_capture_that_fails_says_why(no_gpu, monkeypatch):
    launches = []

    def launch():
        launches.append(1)
        if len(launches) == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(NotCapturable, match=r"^the capture failed: operation not permitted when stream is capturing$"):
        CudaGraph.record(launch, torch.device("cpu"))
