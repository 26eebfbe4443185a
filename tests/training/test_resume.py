"""A training that is killed and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import random
import re
import signal

import pytest
from ase.io import read, write

from torchmdnet2 import checkpoint
from torchmdnet2.cli import main
from torchmdnet2.errors import BadCheckpoint, BadConfig
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run import run as run_module
from torchmdnet2.training.run.folder import check_identity
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.steps import trainer as trainer_module
from torchmdnet2.training.steps.trainer import (
    Trainer,
    TrainingDiverged,
    load_exactly,
    load_state,
    save_state,
)

pytestmark = pytest.mark.usefixtures("without_notes")


def weights_hash(path):
    """sha256 of all tensors of a safetensors file, names included."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def in_folder(raw, folder, **training):
    raw = copy.deepcopy(raw)
    raw["output"]["folder"] = str(folder)
    raw["training"].update(training)
    return raw


def train_quietly(raw):
    """Entry point of the processes that are killed."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        run_training(parse_config(raw), resume="auto")


def finish_with_kills(raw, kills, rng):
    """Run to the end in processes that are killed at random moments; returns how many were killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmdnet2.training.run.run", "ase.io"])
    killed = 0
    while True:
        process = context.Process(target=train_quietly, args=(raw,))
        process.start()
        process.join(rng.uniform(0.2, 0.9) if killed < kills else None)
        if process.exitcode is not None:
            assert process.exitcode == 0
            return killed
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += 1


def check_kills(raw_config, tmp_path, epochs, kills, seed):
    raw_config["output"].update(save_every_seconds=0)
    whole = in_folder(raw_config, tmp_path / "whole", max_epochs=epochs)
    parts = in_folder(raw_config, tmp_path / "parts", max_epochs=epochs)
    run_training(parse_config(whole))
    killed = finish_with_kills(parts, kills, random.Random(seed))
    for name in ("best.tmn", "state.safetensors"):
        assert weights_hash(tmp_path / "whole" / name) == weights_hash(tmp_path / "parts" / name), name
    histories = [load_state(tmp_path / run / "state.safetensors")[1]["history"] for run in ("whole", "parts")]
    for row in histories[0] + histories[1]:
        row.pop("seconds")
    assert histories[0] == histories[1]
    lines = [(tmp_path / run / "metrics.csv").read_text().count("\n") for run in ("whole", "parts")]
    assert lines[0] == lines[1] == epochs + 1
    leftovers = [p.name for p in (tmp_path / "parts").iterdir() if p.name.startswith(".")]
    assert len(leftovers) <= killed  # files that were being written aside when the process was killed
    return killed


def test_killed_at_a_few_random_moments(raw_config, tmp_path):
    assert check_kills(raw_config, tmp_path, epochs=8, kills=3, seed=0) >= 2


@pytest.mark.long
def test_killed_at_twenty_random_moments(raw_config, tmp_path):
    assert check_kills(raw_config, tmp_path, epochs=80, kills=20, seed=1) >= 20


def test_same_seed_same_weights_and_another_seed_others(raw_config, tmp_path):
    hashes = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_training(parse_config(in_folder(raw_config, tmp_path / name, seed=seed)))
        hashes.append(weights_hash(tmp_path / name / "best.tmn"))
    assert hashes[0] == hashes[1] != hashes[2]


def test_workers_do_not_change_the_weights(raw_config, tmp_path):
    hashes = []
    for workers in (0, 2):
        raw = in_folder(raw_config, tmp_path / str(workers), max_epochs=2)
        raw["data"]["num_workers"] = workers
        run_training(parse_config(raw))
        hashes.append(weights_hash(tmp_path / str(workers) / "best.tmn"))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("finished", [True, False])
def test_splits_that_were_edited_since_are_refused(raw_config, monkeypatch, finished):
    raw_config["training"]["max_epochs"] = 2
    if not finished:
        monkeypatch.setattr(run_module, "finish", lambda *_: {})
    path = run_training(parse_config(raw_config))
    state, splits = path.with_name("state.safetensors").read_bytes(), path.with_name("splits.json")
    written = json.loads(splits.read_text())
    edited = json.loads(splits.read_text())
    edited["test"]["indices"].append(edited["train"]["indices"].pop())
    for text in (json.dumps(edited), "{", None):
        splits.unlink() if text is None else splits.write_text(text)
        with pytest.raises(BadConfig, match=r"splits\.json is gone or was edited since"):
            run_training(parse_config(raw_config), resume="auto")
    assert path.with_name("state.safetensors").read_bytes() == state
    splits.write_text(json.dumps(written, indent=2))  # the same content
    assert run_training(parse_config(raw_config), resume="auto") == path


def test_what_is_in_the_folder_is_respected(raw_config, tmp_path):
    path = run_training(parse_config(raw_config))
    content = path.read_bytes()
    with pytest.raises(BadConfig, match="holds a finished run"):
        run_training(parse_config(raw_config))
    assert run_training(parse_config(raw_config), resume="auto") == path  # nothing to do
    other = copy.deepcopy(raw_config)
    other["training"]["lr"] = 1e-3
    with pytest.raises(BadConfig, match=r"training\.lr is 0\.001, was 0\.005\."):
        run_training(parse_config(other), resume="auto")
    assert path.read_bytes() == content
    other["output"]["overwrite"] = True
    run_training(parse_config(other))
    assert path.read_bytes() != content
    with pytest.raises(BadConfig, match="no run to resume"):
        run_training(parse_config(in_folder(raw_config, tmp_path / "none")), resume="must")


EPOCHS = {"training.max_epochs", "training.early_stopping_patience"}


@pytest.mark.parametrize(
    ("change", "also"),
    [
        ({}, set()),
        ({"lr_schedule": "constant"}, EPOCHS),
        ({"lr_schedule": "plateau", "swa": {"start": 0.5}}, set()),
        ({"lr_schedule": "plateau", "loss": {"schedule": {"energy": 9.0}}}, set()),
    ],
)
def test_every_key_that_changes_a_run_is_compared(raw_config, tmp_path, change, also):
    """Walks over the whole configuration; those that may differ are those of docs/training.md."""

    def walk(section, path=()):
        for key, value in section.items():
            if isinstance(value, dict) and value:
                yield from walk(value, (*path, key))
            else:
                yield (*path, key)

    raw_config["training"] |= change
    config = parse_config(raw_config).to_dict()
    free = {"data.num_workers", "training.max_minutes"} | also
    seen = 0
    for path in walk(config):
        other = copy.deepcopy(config)
        section = other
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = "other"
        name = ".".join(path)
        if path[0] == "output" or name in free:
            check_identity({"config": other}, {"config": config}, tmp_path)
        else:
            then, now = {"config": config}, {"config": other}
            if name == "training.lr_schedule":
                now, then = then, now
            with pytest.raises(BadConfig, match=re.escape(name)):
                check_identity(now, then, tmp_path)
        seen += 1
    assert seen > 80


def test_unfinished_run_is_not_overwritten_and_data_must_be_the_same(raw_config, tmp_path):
    config = parse_config(raw_config)
    run_training(config)
    folder = tmp_path / "run"
    (folder / "metrics.json").unlink()  # as if killed before the report
    with pytest.raises(BadConfig, match="holds an unfinished run"):
        run_training(config)
    tensors, state = load_state(folder / "state.safetensors")
    state["identity"]["data"] = dict.fromkeys(state["identity"]["data"], "0" * 64)
    save_state(folder / "state.safetensors", tensors, state)
    with pytest.raises(BadConfig, match=r"morse\.xyz was changed\."):
        run_training(config, resume="auto")


def test_more_epochs_continue_a_finished_run(raw_config, tmp_path):
    whole = in_folder(raw_config, tmp_path / "whole", max_epochs=4, lr_schedule="plateau")
    run_training(parse_config(whole))
    for epochs in (2, 4):
        run_training(
            parse_config(in_folder(raw_config, tmp_path / "parts", max_epochs=epochs, lr_schedule="plateau")), "auto"
        )
    assert weights_hash(tmp_path / "whole" / "best.tmn") == weights_hash(tmp_path / "parts" / "best.tmn")
    early = in_folder(raw_config, tmp_path / "early", max_epochs=6, lr_schedule="constant", warmup_steps=0)
    opposite = read(early["data"]["train"], ":6")  # the more is learned, the worse these are
    for atoms in opposite:
        atoms.calc.results["forces"] = -atoms.calc.results["forces"]
    write(tmp_path / "opposite.xyz", opposite)
    early["data"] |= {"validation": str(tmp_path / "opposite.xyz"), "split": {"test": 6}}
    counts = []
    for patience in (1, 1, None):
        early["training"]["early_stopping_patience"] = patience
        folder = run_training(parse_config(early), "auto").parent
        counts.append(len((folder / "metrics.jsonl").read_text().splitlines()))
    assert counts[0] == counts[1] < counts[2] == 6
    cosine = in_folder(raw_config, tmp_path / "cosine", max_epochs=2)
    run_training(parse_config(cosine))
    cosine["training"]["max_epochs"] = 4  # the rates of its first epochs would have been others
    with pytest.raises(BadConfig, match=r"training\.max_epochs is 4, was 2\."):
        run_training(parse_config(cosine), "auto")


def test_damaged_state_is_refused(tmp_path):
    import torch

    path = tmp_path / "state.safetensors"
    save_state(path, {"a": torch.arange(10.0)}, {"x": 0.1})
    tensors, state = load_state(path)
    assert state == {"x": 0.1}
    assert torch.equal(tensors["a"], torch.arange(10.0))
    blob = path.read_bytes()
    for wrong in (blob[:-8], blob[:20], b"", b"\x80\x04K\x01.", blob.replace(b"training-state", b"training-stale")):
        path.write_bytes(wrong)
        with pytest.raises(BadCheckpoint, match=r"not a training state|remove the file to start again"):
            load_state(path)
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors: no such training state"):
        load_state(tmp_path / "none.safetensors")
    with pytest.raises(
        BadCheckpoint, match=r"state\.safetensors: the training state belongs to another model: .*Linear"
    ):
        load_exactly(torch.nn.Linear(2, 2), tensors, path)
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    assert set(header["__metadata__"]) == {"format", "format_version", "sha256", "state"}


def test_a_changed_byte_in_a_state_is_noticed(tmp_path):
    import torch

    path = tmp_path / "state.safetensors"
    tensors = {"weights": torch.randn(40), "step": torch.tensor(3), "half": torch.randn(3, 2).bfloat16()}
    save_state(path, tensors, {"lr": 0.12345, "history": [1, 2, 3]})
    blob = path.read_bytes()
    spaces = len(blob[: 8 + int.from_bytes(blob[:8], "little")].rstrip())  # what fills up the header says nothing
    rng = random.Random(0)
    for place in rng.sample(range(len(blob)), 300):
        if not spaces <= place < 8 + int.from_bytes(blob[:8], "little"):
            path.write_bytes(blob[:place] + bytes([blob[place] ^ (1 << rng.randrange(8))]) + blob[place + 1 :])
            with pytest.raises(BadCheckpoint, match="state"):
                load_state(path)
    path.write_bytes(blob)
    assert torch.equal(load_state(path)[0]["half"], tensors["half"])


def test_files_are_written_when_it_is_time_and_at_the_end(raw_config, tmp_path, monkeypatch):
    written: list[int] = []
    original = trainer_module.save_state
    monkeypatch.setattr(trainer_module, "save_state", lambda *a: (written.append(a[2]["epoch"]), original(*a)))
    for seconds in (0, 1000):
        config = in_folder(raw_config, tmp_path / str(seconds), max_epochs=4)
        config["output"]["save_every_seconds"] = seconds
        run_training(parse_config(config))
    assert list(dict.fromkeys(written[:-1])) == [0, 1, 2, 3, 4] and written[-2:] == [4, 4]  # and once, at the end
    for file in ("best.tmn", "state.safetensors"):
        assert weights_hash(tmp_path / "0" / file) == weights_hash(tmp_path / "1000" / file)
    rows = [(tmp_path / folder / "metrics.csv").read_text().count("\n") for folder in ("0", "1000")]
    assert rows == [5, 5]


def test_the_best_model_of_a_run_that_fails_is_kept(raw_config, tmp_path, monkeypatch):
    steps = Trainer.steps

    def failing(trainer, order):
        if trainer.epoch == 2:
            raise TrainingDiverged("on purpose")
        return steps(trainer, order)

    monkeypatch.setattr(Trainer, "steps", failing)
    with pytest.raises(TrainingDiverged, match="on purpose"):
        run_training(parse_config(in_folder(raw_config, tmp_path / "run")))
    assert (tmp_path / "run" / "best.tmn").is_file()
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 3


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("at", [3, 8])  # within an epoch, and at the end of one
def test_a_signal_ends_a_training_with_its_state_saved(raw_config, tmp_path, monkeypatch, name, at):
    run_training(parse_config(in_folder(raw_config, tmp_path / "whole")))
    config = parse_config(in_folder(raw_config, tmp_path / "parts"))
    original, handlers = Trainer.steps, [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def signalled(trainer, order):
        for loss in original(trainer, order):
            if trainer.step_count + 1 == at:
                os.kill(os.getpid(), getattr(signal, name))
            yield loss

    monkeypatch.setattr(Trainer, "steps", signalled)
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {name} after step {at}; .* --resume auto") as stop:
        run_training(config)
    assert stop.value.exit_code == 128 + getattr(signal, name)
    assert load_state(tmp_path / "parts" / "state.safetensors")[1]["step"] == at
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(Trainer, "steps", original)
    run_training(config, resume="must")
    for file in ("best.tmn", "state.safetensors"):
        assert weights_hash(tmp_path / "whole" / file) == weights_hash(tmp_path / "parts" / file)


def test_a_second_signal_ends_it_at_once(raw_config, monkeypatch):
    def impatient(trainer, order):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr(Trainer, "steps", impatient)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run_training(parse_config(raw_config))


def test_the_command_says_how_to_go_on(raw_config, tmp_path, monkeypatch, capsys):
    original = Trainer.steps

    def terminated(trainer, order):
        for loss in original(trainer, order):
            os.kill(os.getpid(), signal.SIGTERM)
            yield loss

    monkeypatch.setattr(Trainer, "steps", terminated)
    (tmp_path / "c.yaml").write_text(json.dumps(raw_config))
    assert main(["train", str(tmp_path / "c.yaml")]) == 143
    error = capsys.readouterr().err
    assert (
        error == "the training was stopped by SIGTERM after step 1; its state is saved: continue with --resume auto\n"
    )


def test_data_that_changed_after_the_end(raw_config, tmp_path, data_file):
    raw_config["data"]["train"] = str(tmp_path / "own.xyz")
    (tmp_path / "own.xyz").write_bytes(data_file.read_bytes())
    path = run_training(parse_config(raw_config))
    assert run_training(parse_config(raw_config), resume="auto") == path
    (tmp_path / "own.xyz").write_bytes(data_file.read_bytes() + b"\n")
    with pytest.raises(BadConfig, match=r"own\.xyz was changed"):
        run_training(parse_config(raw_config), resume="auto")


def test_models_of_single_epochs_are_kept(raw_config, tmp_path):
    raw_config["output"]["keep_every"] = 2
    raw_config["training"]["max_epochs"] = 4
    path = run_training(parse_config(raw_config))
    kept = sorted(p.name for p in (tmp_path / "run").glob("epoch_*.tmn"))
    assert kept == ["epoch_0002.tmn", "epoch_0004.tmn"]
    facts = checkpoint.read_header(tmp_path / "run" / "epoch_0004.tmn")["metadata"]["training"]
    assert facts["epoch"] == 4 and facts["step"] == 16
    best = checkpoint.read_header(path)["metadata"]["training"]["best_epoch"]
    same = weights_hash(path) == weights_hash(tmp_path / "run" / f"epoch_{best:04d}.tmn")
    assert same and best in (2, 4)
    whole = (tmp_path / "run" / "epoch_0004.tmn").read_bytes()
    for name in ("epoch_0004.tmn", "metrics.json"):  # as if killed between the state and the model
        (tmp_path / "run" / name).unlink()
    run_training(parse_config(raw_config), resume="auto")
    assert (tmp_path / "run" / "epoch_0004.tmn").read_bytes() == whole


def test_a_run_whose_model_is_gone(raw_config, tmp_path):
    path = run_training(parse_config(raw_config))
    path.unlink()
    with pytest.raises(BadConfig, match=r"best\.tmn, the best model of the run in this folder, is gone"):
        run_training(parse_config(raw_config), resume="auto")
