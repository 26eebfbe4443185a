"""`torchmdnet2 stability`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import (
    Command,
    add_charges,
    add_coulomb,
    add_device,
    add_level,
    device_name,
    make_console,
    output_prefix,
    print_table,
    read_frames,
    split_index,
)

if TYPE_CHECKING:
    from ..md import StabilityReport

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    check = command("stability", _stability, "whether a model survives dynamics: replicas at several temperatures")
    check.add_argument("model", help=".tmn file, or a name that `torchmdnet2 models` lists")
    check.add_argument("frames", help="structures to start from, any format of ASE; some of them as file@10:20")
    check.add_argument("--temperatures", default="300,600", metavar="K,K", help="K, with commas (default: 300,600)")
    check.add_argument("--time", type=float, default=10.0, help="length of each run in ps (default: 10)")
    check.add_argument("--replicas", type=int, default=8, help="runs at each temperature, side by side (default: 8)")
    check.add_argument("--timestep", type=float, default=0.5, help="fs (default: 0.5)")
    check.add_argument("--friction", type=float, help="1/ps, of Langevin dynamics (default: 1)")
    check.add_argument("--seed", type=int, default=0, help="of velocities and noise; run k has seed + k (default: 0)")
    check.add_argument("--output", default="stability", help="prefix of the files, or a folder (default: stability)")
    add_coulomb(check)
    add_level(check)
    add_charges(check)
    check.add_argument("--fail", action="store_true", help="exit with 1 when a replica broke, for scripts")
    add_device(check, dtype=None)


def _stability(options: argparse.Namespace) -> int:
    from ..md import StabilityReport, check_stability

    inputs = [options.model, split_index(options.frames)[0]]
    prefix = output_prefix(options.output, "stability", StabilityReport.files, inputs)
    frames, numbers = read_frames(options.frames)
    console = make_console()
    report = check_stability(
        options.model,
        frames,
        _temperatures(options.temperatures),
        options.time,
        options.replicas,
        options.timestep,
        options.friction,
        options.seed,
        device=device_name(options.device),
        dtype=options.dtype,
        charge=options.charge,
        spin=options.spin,
        console=console,
        allow_untrained_charge=options.allow_untrained_charge,
        coulomb=options.coulomb,
        numbers=numbers,
        level=options.level,
    )
    written = report.write(prefix)
    _print(report, f"{options.model}: {report.time:g} ps from {options.frames}")
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True, markup=False)
    return int(options.fail and not report.survived)


def _temperatures(text: str) -> list[float]:
    from ..errors import BadConfig

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadConfig(
            f"--temperatures: must be numbers with commas between them, as in 300,600, got {text}"
        ) from None


def _print(report: StabilityReport, title: str) -> None:
    heads = ["K", "replicas", "whole", "first ps", "median ps", "mean K", "bonds Å", "protons"]
    jumps = any(s.jumps for s in report.summaries)
    if jumps:
        heads.append("jumps")
    if any(s.novelty is not None for s in report.summaries):
        heads.append("novelty")
    rows = []
    for s in report.summaries:
        first, median = (f"> {report.time:g}" if t is None else f"{t:.2f}" for t in (s.first_break, s.median_break))
        rows.append(
            [f"{s.temperature:g}", str(s.replicas), str(s.survivors), first, median, f"{s.mean_temperature:.0f}",
             f"{s.deviation:.2f}", str(s.transfers), *([str(s.jumps)] if jumps else []),
             *([] if s.novelty is None else [f"{s.novelty:.2f}"])]
        )  # fmt: skip
    print_table(title, heads, rows)
