"""Training several members of an ensemble: the same data, different random seeds.

Every member is a separate run in `member_0`, `member_1`, … of the folder, and can be resumed as any run. When all are
done, `ensemble.json` lists their models for `Ensemble.load`, and `ensemble_metrics.json` has the errors of their mean
and their spread on the test frames; report.html shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from ...checkpoint import read_header
from ...core.files import atomic_write
from ...core.html_page import missing_plots
from ...ensemble import Ensemble, write_ensemble
from ...errors import BadConfig
from ..config.config import Config
from ..reporting.evaluation import Spread, evaluate_ensemble
from ..reporting.log import TrainingLog
from ..reporting.report import ensemble_page, spread_picture
from ..steps.batches import measured_batches
from ..steps.distributed import Devices
from ..steps.loss import in_words, shown
from .folder import protect_inputs
from .levels import levels_of
from .run import run_training
from .setup import Setup, device_of, make_setup
from .start import own_torch_state

__all__ = ["member_config", "run_members"]


def member_config(config: Config, member: int, bootstrap: bool = False) -> Config:
    """Return the configuration of member 0, 1, …: another seed and folder, and with `bootstrap` another draw of
    frames."""
    seed = config.training.seed + member
    split = config.data.split.model_copy(update={"bootstrap": seed} if bootstrap else {})
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"split": split}),
            "training": config.training.model_copy(update={"seed": seed}),
            "output": config.output.model_copy(update={"folder": str(Path(config.output.folder) / f"member_{member}")}),
        }
    )


def run_members(
    config: Config,
    count: int,
    bootstrap: bool = False,
    resume: Literal["auto", "must"] | None = None,
    check: bool = False,
    log: TrainingLog | None = None,
) -> Path | None:
    """Train an ensemble, one member after the other.

    Args:
        config: of each member; the seed is that of the first.
        count: number of members, at least 2.
        bootstrap: draw each member's training frames at random, with repetition.
        resume: "auto" continues where an earlier call was interrupted; "must": each member, or fail.
        check: only check the first member.
        log: where to report; default: standard output, and log.txt of each member.

    Returns:
        Path of ensemble.json; None for `check`.

    Raises:
        BadConfig: fewer than two members, or several levels of theory; as `run_training`.
    """
    if count < 2:
        raise BadConfig(f"--members: an ensemble has at least two members, got {count}")
    if len(levels_of(config)) > 1:
        raise BadConfig(
            "--members: not possible with several levels of theory; train each model separately, with another seed"
        )
    say = (log or TrainingLog(None)).say
    if check:
        run_training(member_config(config, 0, bootstrap), check=True, log=log)
        say(f"{count} members, one after the other: {count} times as long")
        return None
    folder = Path(config.output.folder)
    paths = []
    with Devices.joined(device_of(config.training.device)) as devices:  # one group of processes for all members
        with devices.together():
            if devices.main and (folder / "state.safetensors").is_file():
                raise BadConfig(f"output.folder: {folder} holds the run of a single model; choose another folder")
            if devices.main:
                protect_inputs(folder, ("ensemble.json", "ensemble_metrics.json", "report.html"), config)
        for k in range(count):
            if devices.main:
                say(f"member {k + 1} of {count}")
            member = member_config(config, k, bootstrap)
            started = (Path(member.output.folder) / "state.safetensors").is_file()
            paths.append(run_training(member, resume=resume if started or resume == "must" else None, log=log))
        if not devices.main:
            return folder / "ensemble.json"
    return _together(config, [path for path in paths if path is not None], say)


def _together(config: Config, models: list[Path], say: Callable[[str], None]) -> Path:
    """Write the files of the ensemble: ensemble.json, ensemble_metrics.json, report.html."""
    folder = Path(config.output.folder)
    listed = write_ensemble(models, folder / "ensemble.json")
    with own_torch_state(config):
        metrics, spread = ensemble_metrics(make_setup(config), models)
    atomic_write(folder / "ensemble_metrics.json", json.dumps(metrics, indent=1))
    if config.output.report:
        alone = {model.parent.name: read_header(model)["metadata"]["errors"][metrics["subset"]] for model in models}
        units = {name: value["unit"] for name, value in metrics["spread"].items()}
        images = [
            spread_picture(error.numpy(), deviation.numpy(), name, units[name])
            for name, (error, deviation) in spread.pairs().items()
            if units.get(name) and not missing_plots()
        ]
        atomic_write(folder / "report.html", ensemble_page(folder.name, metrics, alone, images))
    say(f"mean of {len(models)} members, {metrics['subset']}: {in_words(metrics['errors'])}")
    for name, value in metrics["spread"].items():
        (spread_rms, unit), (rmse, _) = (shown(value[key], value["unit"]) for key in ("rms_spread", "rmse"))
        sizes = f"rms spread of the members {spread_rms:.3f}, RMSE of their mean {rmse:.3f} {unit}".rstrip()
        say(f"{name.replace('_', ' ')}: {sizes}; rank correlation {value['correlation']:.2f}")
    say(f"ensemble: {listed}")
    return listed


def ensemble_metrics(setup: Setup, models: list[Path]) -> tuple[dict[str, Any], Spread]:
    """Return errors of the mean of some models, and their relation to the spread of the models.

    Args:
        setup: of the run, for its frames.
        models: model files.

    Returns:
        {"subset": "test", "errors": as `ErrorSums.summary`, "spread": as `Spread.summary`, of the energy per atom and
        every other label that all members predict, "members": their files}, and errors and deviations themselves.
    """
    subset = next(name for name in ("test", "validation", "train") if name in setup.frames)
    frames, config = setup.frames[subset], setup.config
    ensemble = Ensemble.load(models, device_of(config.training.device), torch.float64, allow_untrained_charge=True)
    found = evaluate_ensemble(
        ensemble,
        frames,
        setup.properties,
        units=config.data.units.model_dump(),
        batches=measured_batches(frames, config.training),
    )
    errors, spread = found.sums[0].summary(), found.spread
    listed = [str(model) for model in models]
    return {"subset": subset, "errors": errors, "spread": spread.summary(), "members": listed}, spread
