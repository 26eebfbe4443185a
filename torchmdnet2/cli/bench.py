"""`torchmdnet2 bench` and `torchmdnet2 warm`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Command, add_model, add_precision, make_console, names_options, opening, refuse_idle

if TYPE_CHECKING:
    from ..benchmark import Timing

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    bench = command("bench", _bench, "time the steps of a model on this machine, for water")
    add_model(bench, " (default: the model of docs/performance.md, random weights)", nargs="?")
    bench.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    bench.add_argument("--sides", type=_sides, default="2,4,7,15,32", help="molecules along each side of the boxes or "
                       "droplets, separated by commas (default: 2,4,7,15,32: 24 to 98,304 atoms)")  # fmt: skip
    bench.add_argument("--seconds", type=float, default=60.0, help="time limit for all sizes but the first, which also "
                       "compiles kernels; larger ones are left out (default: 60)")  # fmt: skip
    add_precision(bench)
    bench.add_argument("--vacuum", action="store_true", help="time droplets instead of periodic boxes")
    bench.add_argument("--output", metavar="PREFIX", help="also write PREFIX.json and the plot PREFIX.png")

    warm = command("warm", _warm, "compile the kernels of a model in advance")
    add_model(warm)
    warm.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    warm.add_argument("--atoms", type=_sides, default="22,200,2000", help="sizes of the structures, a molecule and a "
                      "periodic box each, separated by commas; kernels of a GPU differ between sizes (default: "
                      "22,200,2000)")  # fmt: skip


def _sides(text: str) -> list[int]:
    """Parse numbers, such as the sides of the boxes in molecules."""
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if not sides or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers of at least 1, separated by commas, got '{text}'")
    return sides


@names_options
def _bench(options: argparse.Namespace) -> None:
    from ..benchmark import time_steps
    from ..errors import BadConfig

    if not options.seconds > 0:
        raise BadConfig(f"--seconds: must be a positive number, got {options.seconds}")
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise BadConfig(f"--output: there is no folder {Path(options.output).parent}")
    if options.model is None:
        refuse_idle(options, ["level"], "no model is given")
    settings = opening(options, [options.model] if options.model else [])
    console = make_console()

    heads = ["    atoms    ms/step    lowest   highest     ns/day"]

    def show(timing: Timing) -> None:
        on_gpu = timing.memory_GB is not None
        while heads:  # printed before the first row, so that no heads stand above an error
            console.print(heads.pop() + "  memory/GB" * on_gpu, highlight=False)
        row = f"{timing.atoms:9,d}{timing.ms:11.3f}{timing.lowest:10.3f}{timing.highest:10.3f}"
        row += f"{float(f'{timing.ns_per_day:.3g}'):11,g}" + (f"{timing.memory_GB:11.2f}" if on_gpu else "")
        console.print(row, highlight=False, soft_wrap=True)

    found = time_steps(
        options.model, sides=options.sides, seconds=options.seconds, report=show, precision=options.precision,
        vacuum=options.vacuum, **settings,
    )  # fmt: skip
    lines = [
        f"model: {options.model or 'that of docs/performance.md, random weights'}",
        f"device: {found.device}",
        f"method: {found.path.splitlines()[0] if found.path else ''}",
        "systems: " + ("water in periodic boxes" if found.periodic else "droplets of water in vacuum"),
        "times: a step is neighbor search, energy and forces; ms/step is the median of five groups of steps, lowest "
        "and highest are the fastest and the slowest group; ns/day is for time steps of 0.5 fs",
    ]
    lines += [f"larger systems were left out: {found.stopped}"] if found.stopped else []
    if options.output:
        lines.append("wrote " + ", ".join(map(str, found.write(Path(options.output)))))
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _warm(options: argparse.Namespace) -> None:
    from ..benchmark import warm

    path = warm(options.model, sizes=options.atoms, **opening(options, [options.model]))
    console = make_console()
    console.print(f"ready: {path.splitlines()[0]}", highlight=False, soft_wrap=True)
