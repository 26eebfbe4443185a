"""`torchmdnet2 import`, `export` and `fetch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .common import (
    Command,
    add_allow_untrained_charge,
    add_model,
    keeping,
    opening,
    output_file,
    print_table,
    refuse_idle,
)

if TYPE_CHECKING:
    from ..potential.potential import Potential

__all__ = ["add"]


_ABOUT_MODELS = ("energy_unit", "elements", "layout", "member", "ignore")


def add(command: Command) -> None:
    """Declare the arguments."""
    other = command(
        "import", _import, "convert a model of AIMNet2, TorchMD-Net or matgl, or a training YAML of TorchMD-Net"
    )
    other.add_argument("theirs", help=".jpt or .pt, .ckpt, folder of matgl (no code in them is run), or .yaml")
    other.add_argument("ours", help=".tmn or .yaml file to write")
    other.add_argument("--energy-unit", help="unit of its training energies (default: eV)")
    other.add_argument("--elements", help="elements that it was trained on, as in H,C,N,O (default: all supported)")
    other.add_argument("--layout", choices=["2.x", "3.x"], help="version that wrote it, if the file does not state it")
    other.add_argument("--member", type=int, metavar="K", help="one of an ensemble of AIMNet2, from 0 (default: all)")
    other.add_argument("--ignore", help="hyper-parameters to ignore, as in name,name")

    back = command("export", _export, "turn a model file into a TorchMD-Net 3.x checkpoint, or one for LAMMPS's ML-IAP")
    add_model(back)
    back.add_argument("checkpoint", help=".ckpt file to write; .pt for LAMMPS")
    back.add_argument("--to", choices=["torchmd-net", "lammps"], default="torchmd-net", help="(default: torchmd-net)")
    back.add_argument("--elements", help="for LAMMPS: elements that pair_coeff may name, as in H,O")
    back.add_argument("--charge", type=float, default=0.0, help="for LAMMPS: total charge in e (default: 0)")
    back.add_argument("--units", default="metal", help="for LAMMPS: metal or real (default: metal)")
    back.add_argument("--host", action="store_true", help="for LAMMPS: run where Kokkos computes on the CPU too")
    add_allow_untrained_charge(back)

    fetch = command("fetch", _fetch, "download the files of a model from the Hugging Face hub (needs the extra 'hub')")
    fetch.add_argument("model", help="ACCOUNT/MODEL")
    fetch.add_argument("files", nargs="*", help="files to download; without any, the files are listed")
    fetch.add_argument("--revision", help="branch, tag or commit (default: the newest)")
    fetch.add_argument("--output", default=".", metavar="FOLDER", help="folder of the files (default: here)")


def _import(options: argparse.Namespace) -> None:
    from ..checkpoint import to_bytes
    from ..core.files import atomic_write

    from_yaml = Path(options.theirs).suffix in (".yaml", ".yml")
    ours = output_file(options.ours, (".yaml", ".yml") if from_yaml else (".tmn",), [options.theirs], "ours")
    if from_yaml:
        refuse_idle(options, _ABOUT_MODELS, "a YAML file is converted key by key, and holds no model")
        from ..core.yaml_reader import read_text
        from ..importers.training_yaml import convert_yaml

        text = convert_yaml(read_text(options.theirs), options.theirs)
        with keeping(ours):
            atomic_write(ours, text, keep=True)
        print(f"wrote {ours}")
        return
    potential = _reader(options.theirs)(options)
    with keeping(ours):
        atomic_write(ours, to_bytes(potential), keep=True)
    for decision in potential.metadata.get("import", {}).get("decisions", []):
        print(f"- {decision}")
    print(f"wrote {ours}")


def _reader(theirs: str) -> Callable[[argparse.Namespace], Potential]:
    """Return the importer for this kind of model."""
    from ..core.source_files import is_torchscript, read_tensor_file
    from ..models.aimnet2.importer import is_package_model
    from ..models.matgl_tensornet.importer import is_matgl

    if is_matgl(theirs):
        return _matgl
    of_aimnet2 = is_torchscript(theirs) or (theirs.endswith(".pt") and is_package_model(read_tensor_file(theirs)))
    return _aimnet2 if of_aimnet2 else _torchmd_net


def _matgl(options: argparse.Namespace) -> Potential:
    from ..models.matgl_tensornet.importer import import_matgl

    _refuse_others(options, "matgl")
    return import_matgl(options.theirs)


def _aimnet2(options: argparse.Namespace) -> Potential:
    from ..models.aimnet2.importer import import_aimnet2

    _refuse_others(options, "AIMNet2")
    return import_aimnet2(options.theirs, options.member)


def _refuse_others(options: argparse.Namespace, program: str) -> None:
    """Refuse options that are only for checkpoints with missing facts."""
    from ..errors import BadConfig

    for name in ("elements", "layout", "ignore"):
        if getattr(options, name) is not None:
            raise BadConfig(f"--{name} is for checkpoints of TorchMD-Net: a model of {program} states this itself")
    if options.energy_unit not in (None, "eV"):
        raise BadConfig(f"--energy-unit is for checkpoints of TorchMD-Net: models of {program} are in eV")
    if options.member is not None and program != "AIMNet2":
        raise BadConfig("--member is for ensembles of AIMNet2")


def _torchmd_net(options: argparse.Namespace) -> Potential:
    from ..adapters.model import atomic_numbers
    from ..errors import BadConfig
    from ..importers.torchmd_net import import_checkpoint

    if options.member is not None:
        raise BadConfig("--member is for ensembles of AIMNet2")
    elements = None if options.elements is None else atomic_numbers(options.elements.split(","))
    ignore = [] if options.ignore is None else options.ignore.split(",")
    return import_checkpoint(options.theirs, options.energy_unit or "eV", elements, options.layout, ignore=ignore)


def _export(options: argparse.Namespace) -> None:
    from ..checkpoint import load
    from ..errors import BadConfig

    if options.to == "lammps":
        _export_to_lammps(options)
        return
    _refuse_lammps_options(options)
    if options.checkpoint.endswith(".pt"):
        raise BadConfig(f"checkpoint: '{options.checkpoint}' is a file for LAMMPS, which needs --to lammps")
    from ..importers.torchmd_net import export_checkpoint

    checkpoint = output_file(options.checkpoint, (".ckpt",), [options.model], "checkpoint")
    potential = load(options.model, **opening(options, [options.model]))
    with keeping(checkpoint):
        export_checkpoint(potential, checkpoint)
    print(f"wrote {checkpoint}")


def _export_to_lammps(options: argparse.Namespace) -> None:
    from ..adapters.mliap import export_mliap
    from ..checkpoint import load
    from ..errors import BadConfig

    if not options.elements:
        raise BadConfig("--elements: name the elements for pair_coeff, as in --elements H,O")
    elements = [symbol.strip() for symbol in options.elements.split(",")]
    file = output_file(options.checkpoint, (".pt",), [options.model], "checkpoint")
    with keeping(file):
        potential = load(options.model, **opening(options, [options.model]))
        export_mliap(potential, file, elements, options.charge, options.units, options.host, keep=True)
    print(f"wrote {file}\n  pair_style mliap unified {file} 0\n  pair_coeff * * {' '.join(elements)}")


def _refuse_lammps_options(options: argparse.Namespace) -> None:
    from ..errors import BadConfig

    given = options.elements or options.charge or options.host or options.allow_untrained_charge
    if given or options.units != "metal":
        raise BadConfig(
            "--elements, --charge, --units, --host and --allow-untrained-charge are for LAMMPS: give --to lammps"
        )


def _fetch(options: argparse.Namespace) -> None:
    from ..errors import BadConfig
    from ..importers.hub import download, look_up

    folder = Path(options.output)
    if options.files and not folder.is_dir():
        raise BadConfig(f"--output: there is no folder '{folder}'")
    if len({Path(name).name for name in options.files}) < len(options.files):
        raise BadConfig("files: two files have the same name; download them one at a time")
    model = look_up(options.model, options.revision)
    print(f"{model.name} at {model.commit}\nlicence: {model.licence}")
    if not options.files:
        rows = [(file.name, f"{file.size / 1e6:.2f}", file.checksum) for file in model.files]
        print_table("", ("file", "MB", "checksum"), rows, left=(0, 2))
        return
    for name in options.files:
        model.file(name)  # an unknown name is an error before the first download
    written = [download(model, name, folder) for name in options.files]
    for name, path in zip(options.files, written, strict=True):
        print(f"{path}: checksum {model.file(name).checksum} as on the hub")
    checkpoints = [path for path in written if path.suffix == ".ckpt"]
    if any(path.name == "model.json" for path in written):
        print(f"convert it: torchmdnet2 import {folder} NAME.tmn")
    elif checkpoints:
        print(f"convert it: torchmdnet2 import {checkpoints[0]} NAME.tmn")
