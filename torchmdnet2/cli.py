"""The command `torchmdnet2`: train, evaluate, md, import, export, card, info, config.

Exit codes: 0 done, 1 an error (one line on stderr), 2 a mistake in the configuration or the command line,
130 interrupted. Everything heavy is imported by the command that needs it, so that --help is instant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason, or the help
        return int(stop.code or 0)
    try:
        options.run(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `torchmdnet2 config | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if options.traceback or not _is_ours(error):
            raise
        from .errors import BadConfig

        words = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename:
            words = f"{error.filename}: {error.strerror}"
        print(f"torchmdnet2 {options.command}: {' '.join(words.split())}", file=sys.stderr)
        return 2 if isinstance(error, BadConfig) else 1


def _is_ours(error: Exception) -> bool:
    """Whether the message is meant for users; anything else keeps its traceback."""
    here = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    return here or isinstance(error, ValueError | OSError)


# --- the command line ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="torchmdnet2", description="Neural-network potentials: train them, test them, run molecular dynamics."
    )
    parser.add_argument("--version", action="version", version=f"torchmdnet2 {__version__}")
    parser.set_defaults(traceback=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.add_argument("--traceback", action="store_true", help="on an error, show where it arose")
        added.set_defaults(run=run)
        return added

    train = command("train", _train, "train a potential from a YAML configuration")
    train.add_argument("config", help="YAML file; `torchmdnet2 config` prints one to start from")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, repeatable")
    train.add_argument("--check", action="store_true", help="try everything once and write nothing")
    train.add_argument(
        "--resume", choices=["auto", "must"], help="auto: continue an unfinished run if there is one; must: or fail"
    )

    test = command("evaluate", _evaluate, "errors of a potential on labelled frames, by property and element")
    test.add_argument("model", help=".tmn file")
    test.add_argument("data", nargs="+", help="data files: extended XYZ, HDF5, ASE databases and trajectories")
    for name in ("energy", "forces", "stress"):
        test.add_argument(f"--{name}-key", metavar="NAME", help=f"name of the {name} in the data (default: as trained)")
    for name in ("energy", "length", "forces", "stress"):
        test.add_argument(f"--{name}-unit", metavar="UNIT", help=f"unit of {name} in the data (default: as trained)")
    test.add_argument("--split", metavar="FILE", help="splits.json of a training run: only its test frames")
    test.add_argument("--subset", choices=["train", "validation", "test"], help="with --split (default: test)")
    test.add_argument("--batch-size", type=int, default=32, help="frames at a time (default: 32)")
    test.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_device(test, dtype="float64")

    md = command("md", _md, "run molecular dynamics")
    md.add_argument("model", help=".tmn file")
    md.add_argument("start", help="structure, any format of ASE; of several frames the last, or file@index")
    length = md.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="number of steps in all")
    length.add_argument("--time", type=float, help="length in ps (default: 1)")
    md.add_argument("--timestep", type=float, default=0.5, help="fs (default: 0.5)")
    md.add_argument("--temperature", type=float, help="K (default: the start's velocities, else 300 K)")
    md.add_argument("--ensemble", default="nve", help="nve: constant energy; nvt: Langevin (default: nve)")
    md.add_argument("--friction", type=float, default=1.0, help="1/ps, of Langevin dynamics (default: 1)")
    md.add_argument("--seed", type=int, default=0, help="of velocities and noise (default: 0)")
    md.add_argument("--every", type=int, help="steps between frames (default: a thousandth of all, 10 to 100)")
    md.add_argument("--output", default="md", help="prefix of the files, or a folder (default: md)")
    md.add_argument(
        "--trajectory", action="append", default=[], metavar="FILE",
        help=".xyz, .extxyz or .traj, repeatable (default: the prefix + .xyz)",
    )  # fmt: skip
    md.add_argument("--minimize", action="store_true", help="relax the start structure first")
    md.add_argument("--restart", action="store_true", help="continue from the prefix + .restart")
    md.add_argument("--restart-every", type=int, metavar="STEPS", help="(default: a twentieth of all)")
    md.add_argument("--charge", type=int, help="total charge in e, where the structure has none (default: 0)")
    md.add_argument("--spin", type=int, help="multiplicity 2S+1, where the structure has none")
    _add_device(md, dtype=None)

    other = command("import", _import, "turn a TorchMD-Net checkpoint or training YAML into one of ours")
    other.add_argument("theirs", help="a .ckpt, read without running anything in it, or a .yaml")
    other.add_argument("ours", help=".tmn or .yaml file to write")
    other.add_argument("--energy-unit", default="eV", help="unit of its training energies (default: eV)")
    other.add_argument("--elements", help="symbols that it was trained on, as in H,C,N,O (default: all it can take)")
    other.add_argument("--layout", choices=["2.x", "3.x"], help="version that wrote it, where the file cannot tell")
    other.add_argument("--ignore", help="hyper-parameters to disregard, as in name,name")

    back = command("export", _export, "turn a model file into a TorchMD-Net 3.x checkpoint")
    back.add_argument("model", help=".tmn file")
    back.add_argument("checkpoint", help=".ckpt file to write")

    card = command("card", _card, "print the model card of a model file, as Markdown")
    card.add_argument("model", help=".tmn file")

    info = command("info", _info, "print versions, devices and backends, or what a model file holds")
    info.add_argument("model", nargs="?", help=".tmn file")
    info.add_argument("--json", action="store_true", help="print JSON")

    config = command("config", _config, "print a training configuration with every key explained")
    config.add_argument("file", nargs="?", help="a configuration: print it with all defaults filled in instead")
    config.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with a file: change one key")
    config.add_argument("--model", default="tensornet", help="whose keys are listed (default: tensornet)")
    config.add_argument("--from-torchmd-net", metavar="YAML", help="a training YAML of TorchMD-Net, as one of ours")
    return parser


def _add_device(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    told = dtype or "as stored"
    parser.add_argument("--dtype", default=dtype, help=f"float32 or float64, of the network (default: {told})")


# --- commands --------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    from .training.config import load_config
    from .training.run import run_training

    run_training(load_config(options.config, options.set), resume=options.resume, check=options.check)


def _evaluate(options: argparse.Namespace) -> None:
    from .adapters.model import device_of, dtype_of
    from .checkpoint import load
    from .data import open_dataset
    from .errors import BadConfig
    from .training.batches import Frames
    from .training.evaluation import evaluate
    from .training.trainer import Properties

    if options.batch_size < 1:
        raise BadConfig(f"--batch-size must be at least 1, got {options.batch_size}")
    potential = load(options.model, device_of(_device(options.device)), dtype_of(options.dtype))
    trained = potential.metadata.get("config", {}).get("data", {})
    keys = _chosen(
        options,
        "key",
        ("energy", "forces", "stress", "virial", "charge", "spin"),
        trained.get("keys") or {"energy": "energy", "forces": "forces"},
    )
    units = _chosen(options, "unit", ("energy", "length", "forces", "stress"), trained.get("units", {}))
    dataset = open_dataset(options.data if len(options.data) > 1 else options.data[0], keys=keys, units=units)
    frames = Frames(dataset, _frames_of_split(options, len(dataset)), potential.cutoff, cache_bytes=0)
    wanted = Properties(forces="forces" in keys, stress="stress" in keys or "virial" in keys)
    found = evaluate(potential, frames, wanted, options.batch_size, keep_pairs=False)
    if options.json:
        print(json.dumps({"frames": len(frames), **found.errors}, indent=1, ensure_ascii=False))
    else:
        _print_errors(found.errors, f"{options.model} on {len(frames)} frames of {', '.join(options.data)}")


def _md(options: argparse.Namespace) -> None:
    import signal

    from .md import MDOptions, run_md
    from .md.progress import drift_text

    steps = options.steps if options.steps is not None else _steps(options.time, options.timestep)
    chosen = MDOptions(
        steps=steps,
        timestep=options.timestep,
        ensemble=options.ensemble,
        temperature=options.temperature,
        friction=options.friction,
        seed=options.seed,
        every=options.every,
        output=options.output,
        trajectories=tuple(options.trajectory),
        restart=options.restart,
        restart_every=options.restart_every,
        minimize=options.minimize,
    )
    # a queueing system's polite end is treated like Ctrl-C, also where jobs ignore that: write a restart file and stop
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = _console()
    try:
        result = run_md(
            options.model,
            _structure(options.start),
            chosen,
            device=_device(options.device),
            dtype=options.dtype,
            charge=options.charge,
            spin=options.spin,
            console=console,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    temperatures = [row.temperature_K for row in result.rows]
    console.print(
        f"mean temperature {sum(temperatures) / len(temperatures):.1f} K, drift {drift_text(result.drift)}, "
        f"{result.ns_per_day:.3g} ns/day\nwrote " + ", ".join(map(str, result.files)),
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _import(options: argparse.Namespace) -> None:
    from .checkpoint import save
    from .files import atomic_write
    from .importers.torchmd_net import import_checkpoint

    if Path(options.theirs).suffix in (".yaml", ".yml"):
        from .importers.training_yaml import convert_yaml

        atomic_write(options.ours, convert_yaml(Path(options.theirs).read_text(encoding="utf-8"), options.theirs))
        print(f"wrote {options.ours}")
        return
    elements = None if options.elements is None else [_atomic_number(s) for s in options.elements.split(",")]
    ignore = [] if options.ignore is None else options.ignore.split(",")
    potential = import_checkpoint(options.theirs, options.energy_unit, elements, options.layout, ignore=ignore)
    save(potential, options.ours)
    for decision in potential.metadata.get("import", {}).get("decisions", []):
        print(f"- {decision}")
    print(f"wrote {options.ours}")


def _export(options: argparse.Namespace) -> None:
    from .checkpoint import load
    from .importers.export import export_checkpoint

    export_checkpoint(load(options.model), options.checkpoint)
    print(f"wrote {options.checkpoint}")


def _card(options: argparse.Namespace) -> None:
    from .checkpoint import read_header
    from .training.card import model_card

    header = read_header(options.model)
    print(model_card(header["config"], header["metadata"], title=Path(options.model).stem))


def _info(options: argparse.Namespace) -> None:
    if options.model:
        from .checkpoint import read_header

        facts = read_header(options.model)
    else:
        from .diagnostics import surroundings

        facts = surroundings()
    if options.json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        import yaml

        print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).rstrip())


def _config(options: argparse.Namespace) -> None:
    from .errors import BadConfig
    from .registry import REPRESENTATIONS, did_you_mean
    from .training.config import load_config
    from .training.defaults import config_yaml, default_config_yaml

    if options.from_torchmd_net:
        from .importers.training_yaml import convert_yaml

        theirs = Path(options.from_torchmd_net)
        print(convert_yaml(theirs.read_text(encoding="utf-8"), options.from_torchmd_net).rstrip())
        return
    if options.file:
        print(config_yaml(load_config(options.file, options.set)).rstrip())
        return
    if options.set:
        raise BadConfig("--set changes a configuration file: name one")
    known = list(REPRESENTATIONS)
    if options.model not in known:
        raise BadConfig(
            f"unknown model '{options.model}'{did_you_mean(options.model, known)} Known: {', '.join(known)}"
        )
    print(default_config_yaml(options.model).rstrip())


# --- helpers ---------------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    return Console()


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _steps(time: float | None, timestep: float) -> int:
    """Steps that make up a time in ps, 1 ps when None."""
    from .errors import BadConfig

    time = 1.0 if time is None else time
    if not (0 <= time < 1e9 and timestep > 0):
        raise BadConfig(f"time and timestep must be positive numbers, got {time} ps and {timestep} fs")
    return round(1000 * time / timestep)


def _structure(path: str) -> Atoms:
    from ase.io import read

    from .errors import BadData

    if not Path(path.partition("@")[0]).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        atoms = read(path)
    except Exception as error:  # ASE's readers raise whatever they meet
        raise BadData(f"{path}: cannot be read as a structure: {error or type(error).__name__}") from error
    if isinstance(atoms, list):
        raise BadData(f"{path}: names several structures; choose one, as in file.xyz@0")
    return atoms


def _chosen(options: argparse.Namespace, kind: str, names: Sequence[str], trained: dict[str, Any]) -> dict[str, str]:
    """Keys or units: what the command line says, else what the model was trained with, without the absent ones."""
    values = {name: getattr(options, f"{name}_{kind}", None) or trained.get(name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _frames_of_split(options: argparse.Namespace, total: int) -> list[int]:
    from .errors import BadConfig

    if options.split is None:
        if options.subset:
            raise BadConfig("--subset chooses from a split: give --split too")
        return list(range(total))
    subset = options.subset or "test"
    try:
        indices = json.loads(Path(options.split).read_text(encoding="utf-8"))[subset]["indices"]
        inside = all(isinstance(i, int) and 0 <= i < total for i in indices)
    except (ValueError, KeyError, TypeError) as error:
        raise BadConfig(f"{options.split}: no '{subset}' frames in it: {error!r}") from error
    if not inside:
        raise BadConfig(f"{options.split}: goes with another data file: this one has {total} frames")
    return indices


def _print_errors(errors: dict[str, Any], title: str) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("property", "MAE", "RMSE", "unit", "labels"):
        table.add_column(name, justify="left" if name in ("property", "unit") else "right")
    for name, value in errors.items():
        entries = {f"forces on {z}": e for z, e in value.items()} if name == "forces_by_element" else {name: value}
        for label, error in entries.items():
            milli = (f"{1e3 * error[kind]:.3f}" for kind in ("mae", "rmse"))
            table.add_row(label.replace("_", " "), *milli, f"m{error['unit']}", str(error["count"]))
    _console().print(table)


def _atomic_number(symbol: str) -> int:
    from .errors import BadConfig
    from .potential import SYMBOLS

    if symbol.strip() not in SYMBOLS[1:]:
        raise BadConfig(f"--elements: '{symbol}' is not an element; write symbols, as in H,C,N,O")
    return SYMBOLS.index(symbol.strip())
