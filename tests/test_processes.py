"""Processes that are forked off one that has used a potential work, or say why they cannot."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from ase.io import write
from tiny import ethanol, tiny_potential

import torchmdnet2
from torchmdnet2 import Evaluator, System
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.core import devices as processes
from torchmdnet2.core import files, pipeline
from torchmdnet2.core.pipeline import ProcessEnded, _in_words, devices_pool, helpers_pool, in_order
from torchmdnet2.errors import BadConfig
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.streams import run
from torchmdnet2.training.run.folder import exclusive_folder
from torchmdnet2.training.steps.trainer import Interrupted

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

_BEGIN = """
import os, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(4)  # without threads there is nothing to wait for
from tiny import ethanol, tiny_potential
from torchmdnet2 import Evaluator, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator

potential = tiny_potential(dtype=torch.float32)
system = System.from_ase([ethanol()] * 40)


class Frames(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return potential(system).energy[index]


def calculator_energy(seed):
    atoms = ethanol()
    atoms.calc = calculator
    return atoms.get_potential_energy()


def in_child(function):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 7 if function() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def same(energy):
    return bool(((energy - expected).abs() < 1e-3).all())


calculator, evaluator = TorchMDNet2Calculator(potential), Evaluator(potential)
expected, alone = potential(system).energy, calculator_energy(0)
evaluator(system)
"""

_USES = {
    "potential": "in_child(lambda: same(potential(system).energy))",
    "evaluator": "in_child(lambda: same(evaluator(system).energy))",
    "bound step": """
bound = evaluator.bind(system)
def use():
    bound.replay()
    return same(bound.energy)
in_child(use)
""",
    "calculator in a pool": """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert max(abs(e - alone) for e in pool.map(calculator_energy, range(4))) < 1e-3
""",
    "data loader": """
loader = torch.utils.data.DataLoader(Frames(), num_workers=2, multiprocessing_context="fork")
assert float((torch.cat(list(loader)) - expected[:2]).abs().max()) < 1e-3
""",
    "weights made in the child": "in_child(lambda: same(tiny_potential(dtype=torch.float32)(system).energy))",
    "threads asked for in a training": """
from types import SimpleNamespace
from torchmdnet2.training.run.start import own_torch_state
config = SimpleNamespace(training=SimpleNamespace(num_threads=4, device="cpu", seed=0))
def use():
    with own_torch_state(config):
        return same(potential(system).energy)
in_child(use)
""",
    "while another thread evaluates": """
stop = []
def go_on():
    while not stop:
        evaluator(system)
thread = threading.Thread(target=go_on)
thread.start()
for _ in range(3):
    in_child(lambda: same(evaluator(system).energy))
stop.append(1)
thread.join()
""",
}


def test_forked_processes_evaluate():
    """Each of them waited for ever."""
    script = _BEGIN.format(tests=str(Path(__file__).parent)) + "".join(
        f"\nprint({name!r}, flush=True)\n{code}" for name, code in _USES.items()
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = parent.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(parent.pid, signal.SIGKILL)
        pytest.fail(f"a forked process waits for ever: {parent.communicate()[0]}")
    assert parent.returncode == 0, output


@pytest.mark.parametrize(("begun", "words"), [(False, "__name__ == '__main__'"), (True, "ended from outside")])
def test_processes_that_end(begun, words):
    """A script without a guard, which every process would run again, is told from a process that was killed."""
    with pytest.raises(RuntimeError, match=words), _in_words(lambda: begun):
        raise BrokenProcessPool


@pytest.mark.parametrize("pool", ["device", "helpers"])
def test_what_waits_is_not_computed_after_an_error(pool):
    pools = {"device": lambda: devices_pool(lambda _: time.sleep, ["cpu"]), "helpers": lambda: helpers_pool(1, "json")}
    futures = []
    with pytest.raises(KeyError), pools[pool]() as opened:
        one = opened if pool == "device" else opened(time.sleep, False)
        futures += [one.submit(0.2) for _ in range(6)]
        raise KeyError
    assert futures[-1].cancelled() and futures[-2].cancelled()


def _threads(device):
    return lambda _: (torch.get_num_threads(), [os.environ.get(name) for name in pipeline._THREADS])


def _stop(block):
    raise Interrupted(signal.SIGTERM, "stopped after step 7")


def _faulty(kind, device):
    """Work that fails in a way, or at once."""
    if kind == "setup":
        raise BadConfig(f"no {device}")
    if kind == "stop":
        return _stop
    works = {
        "work": lambda block: {}[block], "warning": lambda block: warnings.warn(f"doubts about {block}", stacklevel=2),
        "kill": lambda block: os.kill(os.getpid(), signal.SIGKILL), "long": lambda block: time.sleep(300),
    }  # fmt: skip
    return works[kind]


def test_errors_and_warnings_of_processes_are_told_here():
    faults = {
        "setup": (BadConfig, "no cpu"), "work": (KeyError, "7"), "kill": (ProcessEnded, "ended .*; take fewer"),
        "stop": (Interrupted, "stopped after step 7"),
    }  # fmt: skip
    for kind, (error, words) in faults.items():
        with (
            pytest.raises(error, match=words),
            devices_pool(partial(_faulty, kind), ["cpu", "cpu"], remedy="take fewer") as pool,
        ):
            list(in_order([7], pool))
    with warnings.catch_warnings(record=True) as told, devices_pool(partial(_faulty, "warning"), ["cpu"] * 2) as pool:
        list(in_order("ab", pool))
    assert [str(one.message) for one in told] == ["doubts about a", "doubts about b"]


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_ctrl_c_does_not_wait_for_long_work(devices):
    begun, before = time.monotonic(), signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background
    timer = threading.Timer(
        5.0 if len(devices) > 1 else 1.0, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt), devices_pool(partial(_faulty, "long"), devices, here=True) as pool:
        list(in_order(range(4), pool))
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_process_of_a_device_has_one_core(monkeypatch, device):
    """With all cores for the libraries of each process, two GPUs together were slower than one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with devices_pool(_threads, [f"{device}:0", f"{device}:1"]) as pool:
        assert [pool.submit(None).result() for _ in range(4)] == [(1, ["1"] * 3)] * 4
    assert os.environ["OMP_NUM_THREADS"] == "3" and "OPENBLAS_NUM_THREADS" not in os.environ


def test_two_runs_on_one_worker_of_a_cluster_keep_their_models():
    begun = []

    def setup(name, device):
        begun.append(name)
        return f"{name} {{}}".format

    jobs = {name: partial(pipeline._run_job, f"job {name}", partial(setup, name), "cpu") for name in "abc"}
    assert [jobs[name](1) for name in "abab"] == ["a 1", "b 1", "a 1", "b 1"] and begun == ["a", "b"]
    assert [jobs[name](2) for name in "cba"] == ["c 2", "b 2", "a 2"]
    assert begun == ["a", "b", "c", "a"] and len(pipeline._jobs) == 2  # the last ones


def test_two_runs_do_not_write_the_same_files(tmp_path):
    """The second one of md, relax and score is refused, and reads and changes nothing; the end of the first frees its
    files, also where it was killed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom torchmdnet2.core.files import claimed\n"
        "with claimed(*map(Path, sys.argv[1:])):\n    print('ready', flush=True)\n    sys.stdin.read()"
    )
    names = [str(tmp_path / name) for name in ("md", "t.xyz", "o.failed.txt", "r.1.xyz", "table.csv")]
    runs = [
        lambda: run_md(tiny_potential(), ethanol(), MDOptions(steps=2, output=names[0], restart=True)),
        lambda: run_md(tiny_potential(), ethanol(), MDOptions(steps=2, output=names[0])),
        lambda: run_md(
            tiny_potential(), ethanol(), MDOptions(steps=2, trajectories=(names[1],), output=f"{names[0]}2")
        ),
        lambda: run_md(
            tiny_potential(),
            ethanol(),
            MDOptions(steps=2, replicas=2, trajectories=(str(tmp_path / "r.xyz"),), output=f"{names[0]}3"),
        ),
        lambda: torchmdnet2.score(tiny_potential(), [ethanol()], tmp_path / "table.csv"),
        lambda: torchmdnet2.score(tiny_potential(), [ethanol()], tmp_path / "o.csv"),
        lambda: torchmdnet2.relax(tiny_potential(), [ethanol()], tmp_path / "o.xyz", steps=1),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        before = sorted(os.listdir(tmp_path))
        for begin in runs:
            with pytest.raises(BadConfig, match="another run writes to this file; wait for its end, or choose another"):
                begin()
            assert sorted(os.listdir(tmp_path)) == before
        other.kill()
    for begin in runs[1:]:
        begin()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".lock")]


def test_a_lock_that_is_removed_while_another_run_opens_it(tmp_path, monkeypatch):
    """The file of a lock vanishes with its holder: a run that has opened it takes a new one."""
    lock, calls = files.try_lock, []

    def removed(handle, path):
        lock(handle, path)
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / ".a.lock").unlink()

    monkeypatch.setattr(files, "try_lock", removed)
    with files.claimed(tmp_path / "a"):
        assert len(calls) == 2
        with pytest.raises(BadConfig, match="another run writes"), files.claimed(tmp_path / "a"):
            pass


def test_a_run_that_begins_when_another_one_ends_keeps_its_lock(tmp_path, monkeypatch):
    unlock, begun = files._unlock, ExitStack()

    def ended(handle):
        unlock(handle)
        monkeypatch.setattr(files, "_unlock", unlock)
        begun.enter_context(files.claimed(tmp_path / "a"))

    monkeypatch.setattr(files, "_unlock", ended)
    with files.claimed(tmp_path / "a"):
        pass
    with begun, pytest.raises(BadConfig, match="another run writes"), files.claimed(tmp_path / "a"):
        pass
    assert not os.listdir(tmp_path)


def test_a_run_removes_what_a_killed_one_has_written_aside(tmp_path):
    """Of its file and its state, and nothing else."""
    script = "import os, sys\nfrom torchmdnet2.core.files import written_aside\n"
    script += (
        "kept = [written_aside(name) for name in sys.argv[1:]]\nfor one in kept:\n    one.__enter__()\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, "a.csv", "a.csv.progress", "b.csv"], cwd=tmp_path, check=False)
    (tmp_path / ".a.csv.notes").touch()
    assert len(os.listdir(tmp_path)) == 4
    with files.claimed(tmp_path / "a.csv"):
        found = sorted(os.listdir(tmp_path))
    assert found[:2] == [".a.csv.lock", ".a.csv.notes"] and len(found) == 3 and found[2].startswith(".b.csv.")


def test_locks_of_windows_and_of_file_systems_without_any(tmp_path, monkeypatch):
    import fcntl

    class Windows:
        LK_NBLCK, fails = 2, None

        def locking(self, handle, mode, size):
            if self.fails is not None:
                raise self.fails
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PermissionError(13, "Permission denied") from None  # as of msvcrt

    windows = Windows()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    with files.claimed(tmp_path / "a"):
        with pytest.raises(BadConfig, match="another run writes"), files.claimed(tmp_path / "a"):
            pass
    windows.fails = OSError(errno.ENOLCK, "No locks available")
    with pytest.warns(UserWarning, match=r"this file system has no locks \(No locks available\)"):
        with files.claimed(tmp_path / "a"):
            pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", failing(OSError(number, os.strerror(number))))
    with pytest.warns(UserWarning, match="this file system has no locks"), files.claimed(tmp_path / "a"):
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EBADF, errno.ESTALE])
def test_other_errors_of_a_lock_are_errors(tmp_path, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", failing(OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match="it cannot be locked against other runs: ") as caught:
        with files.claimed(tmp_path / "a"):
            pass
    assert caught.value.errno == number and caught.value.filename == str(tmp_path / "a")
    with pytest.raises(BadConfig, match=r"output\.folder: .*it cannot be locked against other runs"):
        with exclusive_folder(tmp_path):
            pass


def failing(error):
    def fail(*_):
        raise error

    return fail


def test_a_lock_of_another_user_is_named_with_its_remedy(tmp_path, monkeypatch):
    opened = open

    def refuse(path, *args):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args)

    (tmp_path / ".a.lock").touch()
    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(BadConfig, match=r"\.a\.lock: this file, which guards \S*a, cannot .* remove this file"):
        with files.claimed(tmp_path / "a"):
            pass
    with pytest.raises(PermissionError) as caught:  # not the lock, but its folder cannot be written
        with files.claimed(tmp_path / "b"):
            pass
    assert caught.value.filename == str(tmp_path / "b")


def test_processes_of_a_daemon_and_commands_in_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.process.current_process(), "_config", {"daemon": True})
    with pytest.raises(BadConfig, match=r"a worker of a multiprocessing\.Pool cannot start"):
        torchmdnet2.relax(tiny_potential(), [ethanol(), ethanol()], steps=1, devices="cpu,cpu")
    through = run.through  # helpers, as beside a GPU, are done without
    monkeypatch.setattr(
        run, "through", lambda blocks, stages, names, module, *_: through(blocks, stages, names, module, 2, True)
    )
    (outcome,) = torchmdnet2.score(tiny_potential(), [ethanol()])
    assert outcome.structures
    monkeypatch.undo()
    save(tiny_potential(), tmp_path / "m.tmn")
    write(tmp_path / "a.xyz", ethanol())
    given = ["md", str(tmp_path / "m.tmn"), str(tmp_path / "a.xyz"), "--steps", "2", "--output", str(tmp_path / "md")]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(given)))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_lock_that_was_held_at_the_fork_is_free_in_the_child():
    lock, inside, leave = processes.ProcessLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    lock._pid = -2  # as after a fork
    with lock, lock:
        pass
    leave.set()
    thread.join()


def test_a_gpu_that_the_parent_had_used_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="'spawn'"):
        processes.refuse_forked_gpu(torch.device("cuda"))
    processes.refuse_forked_gpu(torch.device("cpu"))
    system = System(z=torch.tensor([1, 1]), pos=torch.tensor([[0.0, 0, 0], [0, 0, 0.8]]))
    potential = tiny_potential()
    evaluator = Evaluator(potential)
    monkeypatch.setattr(type(potential), "device", torch.device("cuda"))
    for path in (potential, evaluator):
        with pytest.raises(RuntimeError, match="forked off one that had used the GPU"):
            path(system)
