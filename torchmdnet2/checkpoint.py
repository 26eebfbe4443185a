"""Model files (.tmn): a safetensors file whose header carries the configuration, metadata and a checksum.

Header metadata, all strings: `format` = "torchmdnet2", `format_version`, `config` and `metadata` (JSON), `sha256`
(of the whole file with these 64 digits replaced by zeros); of a calibrated potential also `novelty` (JSON) and
tensors named novelty.… . float32 weights that are all exact in float16 are stored as float16, in half of the space, and
read as float32 again. Reading a file executes nothing: numbers and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .core.devices import device_of, dtype_of
from .core.files import atomic_write
from .errors import BadCheckpoint
from .potential.cells import coulomb_in_cells
from .potential.levels import levels_of
from .potential.novelty import Calibration
from .potential.potential import Potential
from .potential.refusals import require_flag, require_potential
from .potentials import find_model, is_name

__all__ = ["FORMAT_VERSION", "from_bytes", "load", "read_header", "save", "to_bytes"]

FORMAT_VERSION = 1
_ZEROS = b"0" * 64
_NOVELTY = "novelty."
_HASH = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def save(potential: Potential, path: str | os.PathLike, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a potential to a model file, atomically.

    Args:
        potential: must have been built by `Potential.from_config` (its config is stored).
        path: it usually ends in .tmn.
        metadata: facts for users as plain data: data set, errors, licence, …; default: `potential.metadata`.

    A calibration (`torchmdnet2 calibrate`) is stored too, unless the weights have changed since: then a warning says
    that it is left out.

    Raises:
        ValueError: the potential has no config, or differs from its config; or a weight is not finite.
    """
    atomic_write(path, to_bytes(potential, metadata))


def to_bytes(potential: Potential, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of a model file; arguments and errors as `save`.

    Args:
        potential: as of `save`.
        metadata: as of `save`.
    """
    from safetensors.torch import save as to_safetensors

    if "model" not in require_potential(potential).config:
        raise ValueError("only a potential built by Potential.from_config can be saved: its config is stored")
    _require_as_configured(potential)
    tensors = _in_16_bits({name: value.detach().cpu().contiguous() for name, value in potential.state_dict().items()})
    calibration = _valid_calibration(potential)
    if calibration is not None:
        tensors |= {_NOVELTY + name: value for name, value in calibration.tensors().items()}
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"'{name}' holds values that are not finite; the model is not saved")
    header = {
        "format": "torchmdnet2",
        "format_version": str(FORMAT_VERSION),
        "config": _config_json(potential.config),
        "metadata": _sorted_json(dict(potential.metadata if metadata is None else metadata)),
        "sha256": _ZEROS.decode(),
    }
    if calibration is not None:
        header["novelty"] = _sorted_json(calibration.stored_facts())
    blob = _in_fixed_order(to_safetensors(tensors, metadata=header))
    # the only one: config and metadata are strings in the header, whose quotes are escaped
    (found,) = _HASH.finditer(blob, 8, 8 + int.from_bytes(blob[:8], "little"))
    start = found.start(1)
    digest = hashlib.sha256(blob).hexdigest().encode()
    return blob[:start] + digest + blob[start + 64 :]


def load(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str = "pme",
    level: str | None = None,
) -> Potential:
    """Read a potential from a model file, in evaluation mode.

    Args:
        path: a .tmn file, or the name of a potential (`torchmdnet2 models`).
        device: where the weights go.
        dtype: floating-point type of the network, float32 or float64; None keeps the stored one.
        allow_untrained_charge: evaluate total charges that the model was not trained on, with a warning, which are
            refused otherwise.
        coulomb: "pme" or "dsf", as of `torchmdnet2.load`.
        level: as of `torchmdnet2.load`.

    Raises:
        FileNotFoundError: there is no such file, nor a potential of this name.
        BadCheckpoint: the file is damaged, was written by a newer version, or is not a model file.
        ValueError: the device or dtype cannot be used, `coulomb` has no effect on this model, it does not have this
            level, or `allow_untrained_charge` is not True or False.
    """
    coulomb_in_cells(coulomb)
    require_flag(allow_untrained_charge, "allow_untrained_charge")
    potential = from_bytes(_read(path), device_of(device), dtype_of(dtype), name=path)
    potential = potential if level is None else potential.at_level(level)
    potential.allow_untrained_charge = allow_untrained_charge
    potential.coulomb = coulomb_in_cells(coulomb, potential)
    return potential


def from_bytes(
    blob: bytes,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    name: str | os.PathLike = "model in memory",
) -> Potential:
    """Return a potential from the content of a model file; see `load`.

    Args:
        blob: the content of a model file.
        device: as of `load`.
        dtype: as of `load`.
        name: of the file, for error messages.
    """
    from safetensors.torch import load as from_safetensors

    header = _verified_header(blob, name)
    with torch.inference_mode(False):  # weights made in that mode could not be used outside of it, nor for forces
        try:
            potential = _from_config({**_stated(header["metadata"]), **header["config"]})
            state = from_safetensors(blob)
            fitted = {name: state.pop(name) for name in list(state) if name.startswith(_NOVELTY)}
            potential = potential.to(_stored_dtype(state))  # whatever torch's default type is
            potential.load_state_dict(state, strict=True)
            if "novelty" in header:
                named = {name.removeprefix(_NOVELTY): value for name, value in fitted.items()}
                potential.calibration = Calibration.stored(named, header["novelty"])
                if not potential.calibration.fits(potential.representation):
                    raise ValueError("its calibration belongs to other weights")
        except Exception as error:  # the content is not trusted: whatever it brings about, the file is to blame
            raise BadCheckpoint(f"{name}: the model cannot be built from its configuration: {error}") from error
        potential.metadata = header["metadata"]
        return potential.to(device=device, dtype=dtype).eval()


def read_header(path: str | os.PathLike) -> dict[str, Any]:
    """Return levels of theory, configuration, metadata, format_version and sha256 of a model file, checked.

    "levels" lists the default first, and is empty where the file states none. A calibrated model also has "novelty".

    Args:
        path: of a model file.

    Raises:
        FileNotFoundError, BadCheckpoint: as `load`.
    """
    return _verified_header(_read(path), path)


def _valid_calibration(potential: Potential) -> Calibration | None:
    """Return the calibration of a potential, unless its weights have changed."""
    found = potential.calibration
    if found is None or found.fits(potential.representation):
        return found
    warnings.warn(
        "the weights have changed since the model was calibrated: it is saved without its calibration; run "
        "`torchmdnet2 calibrate` again",
        stacklevel=4,
    )
    return None


def _require_as_configured(potential: Potential) -> None:
    """Raise ValueError if the file would hold another model, or one that cannot be loaded."""
    found, stored = _parts(potential), _parts(_from_config(potential.config))
    for name in [*stored, *found]:
        if found.get(name) != stored.get(name):
            raise ValueError(
                f"{name}: the potential has {found.get(name)}, and its config, which is stored, says "
                f"{stored.get(name)}: change both"
            )


def _parts(potential: Potential) -> dict[str, Any]:
    """Return the facts that a config determines."""
    names = (
        "energy_scale", "energy_shift", "subtract_isolated", "atom_filter", "elements", "total_charges", "closed_shell",
        "determined", "level_names",
    )  # fmt: skip
    return {
        **{name: getattr(potential, name) for name in names},
        "cutoff": potential.cutoff,
        **{f"priors.{k}": type(prior).__name__ for k, prior in enumerate(potential.priors)},
        **{f"priors.{k}.cutoff": prior.cutoff for k, prior in enumerate(potential.priors)},
        **{name: list(value.shape) for name, value in potential.state_dict().items()},
    }


def _from_config(config: Mapping[str, Any]) -> Potential:
    """Return an untrained potential, whose weights will be overwritten; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # whatever torch's default device is
        return Potential.from_config(config)


def _stated(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the total charges of the training; older files have them in their metadata only."""
    data = metadata.get("data")
    charges = data.get("charges") if isinstance(data, dict) else None
    numbers = isinstance(charges, list) and charges and all(type(q) in (int, float) for q in charges)
    return {"total_charges": charges} if numbers else {}


def _sorted_json(value: Any) -> str:
    """Return JSON with sorted keys; numbers as keys become strings first, as after reading."""
    return json.dumps(json.loads(json.dumps(value)), sort_keys=True)


def _config_json(config: Mapping[str, Any]) -> str:
    """Return JSON of a configuration with sorted keys, but levels in the order of their weights."""
    found = json.loads(_sorted_json(config))
    if found.get("levels"):
        found["levels"] = {name: found["levels"][name] for name in config["levels"]}
    return json.dumps(found)


def _levels_in_order(config: dict[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its levels in the order of their weights, which early files have only in the metadata
    of the training."""
    levels, data = config.get("levels"), metadata.get("data")
    stated = data.get("levels") if isinstance(data, dict) else None
    if isinstance(levels, dict) and isinstance(stated, list) and sorted(stated[1:]) == sorted(levels):
        return {**config, "levels": {name: levels[name] for name in stated[1:]}}
    return config


def _in_fixed_order(blob: bytes) -> bytes:
    """Return the file with sorted metadata, so that equal models give equal bytes: safetensors writes them in any
    order."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + blob[start:]


def _in_16_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all float32 tensors as float16, if that changes no number; otherwise all unchanged."""
    halves = {name: value.half() for name, value in tensors.items() if value.dtype == torch.float32}
    exact = all(torch.equal(half.float(), tensors[name]) for name, half in halves.items())
    return tensors | halves if exact else tensors


def _stored_dtype(state: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the most frequent type of the weights of the representation; float32 instead of 16 bits."""
    count: dict[torch.dtype, int] = {}
    for name, value in state.items():
        if name.startswith("representation.") and value.is_floating_point():
            count[value.dtype] = count.get(value.dtype, 0) + value.numel()
    found = max(count, key=lambda dtype: count[dtype]) if count else torch.float32
    return torch.float32 if found == torch.float16 else found


def _read(path: str | os.PathLike) -> bytes:
    file = find_model(path)
    if file.is_dir():
        raise BadCheckpoint(f"{file} is a folder, and a model file is needed{_in_folder(file)}")
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such model file{_alike(file)}")
    return file.read_bytes()


def _in_folder(folder: Path) -> str:
    """Return what to give instead of a folder, for the error message."""
    if (folder / "best.tmn").is_file():
        return f": give {folder / 'best.tmn'}"
    if (folder / "model.json").is_file():
        return "; a model of matgl is converted by `torchmdnet2 import`"
    return ": give a .tmn file, or the name of a potential (`torchmdnet2 models`)"


def _alike(file: Path) -> str:
    """Return which potential may be meant by a missing file, for the error message."""
    if file.suffix == ".tmn" and is_name(file.stem):
        return f": the potential '{file.stem}' is given by its name alone"
    return ""


def _of_others(path: str | os.PathLike, blob: bytes) -> str:
    """Return what to do with a file that is not a model file, for the error message."""
    if not blob:
        return "; it is empty"
    if str(path).endswith(".json"):
        return (
            "; a list of models is read by `evaluate`, `score`, `relax`, `scan` and Ensemble.load: give one of its "
            "models here"
        )
    if blob.startswith((b"PK\x03\x04", b"\x80")):  # the archives and pickles of PyTorch
        return "; `torchmdnet2 import` converts checkpoints of TorchMD-Net, and files of AIMNet2 (.jpt)"
    return ""


def _verified_header(blob: bytes, path: str | os.PathLike) -> dict[str, Any]:
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 10 or size > min(len(blob) - 8, 100_000_000) or blob[8:9] != b"{":
        raise BadCheckpoint(f"{path}: not a torchmdnet2 model file, or cut short{_of_others(path, blob)}")
    found = list(_HASH.finditer(blob, 8, 8 + size))
    if len(found) != 1:
        raise BadCheckpoint(f"{path}: no checksum in the header: damaged, or not a torchmdnet2 model file")
    start = found[0].start(1)
    whole = hashlib.sha256(memoryview(blob)[:start])
    whole.update(_ZEROS)
    whole.update(memoryview(blob)[start + 64 :])
    if whole.hexdigest().encode() != found[0][1]:
        raise BadCheckpoint(f"{path}: the checksum does not match: the file is damaged; get a fresh copy")
    try:
        header = json.loads(blob[8 : 8 + size])["__metadata__"]
        if header["format"] != "torchmdnet2":
            raise BadCheckpoint(f"{path}: format '{header['format']}' is not a torchmdnet2 model")
        version = int(header["format_version"])
        if version != FORMAT_VERSION:
            raise BadCheckpoint(
                f"{path}: format version {version}; this torchmdnet2 reads version {FORMAT_VERSION}: "
                + ("upgrade torchmdnet2" if version > FORMAT_VERSION else "the file is not valid")
            )
        config, metadata = json.loads(header["config"]), json.loads(header["metadata"])
        if not (isinstance(config, dict) and isinstance(metadata, dict)):
            raise BadCheckpoint(f"{path}: configuration and metadata must be mappings")
        config = _levels_in_order(config, metadata)
        novelty = {"novelty": json.loads(header["novelty"])} if "novelty" in header else {}
        known = {"levels": levels_of(config, metadata), "config": config, "metadata": metadata}
        return {**known, "format_version": version, "sha256": header["sha256"], **novelty}
    except BadCheckpoint:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: the header cannot be read: {error}") from error
