"""`torchmdnet2 md` and `torchmdnet2 stability`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .common import (
    Command,
    add_charges,
    add_coulomb,
    add_device,
    add_devices,
    add_model,
    add_precision,
    make_console,
    names_options,
    opening,
    output_prefix,
    print_table,
    read_frames,
    read_structure,
    refuse_other_charge,
    split_index,
)

if TYPE_CHECKING:
    from ase import Atoms

    from ..md import MDOptions, StabilityReport

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    md = command("md", _md, "run molecular dynamics")
    add_model(md)
    md.add_argument(
        "start", nargs="?", help="structure, any format of ASE or of data; of several frames the last, or file@0, …"
    )
    md.add_argument("--smiles", help="start from this molecule instead of a file (needs the extra 'smiles')")
    length = md.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="total number of steps")
    length.add_argument("--time", type=float, help="length in ps (default: 1)")
    md.add_argument("--timestep", type=float, help="fs (default: 0.5, with --inner 0.5 times the inner steps)")
    md.add_argument("--temperature", type=float, help="K (default: the start's velocities, else 300 K)")
    md.add_argument(
        "--ensemble", default="nve",
        help="nve: constant energy; nvt: Langevin; npt: Langevin at constant pressure (default: nve)",
    )  # fmt: skip
    md.add_argument("--friction", type=float, help="friction of Langevin dynamics, 1/ps (default: 1)")
    md.add_argument("--pressure", type=float, metavar="BAR", help="of npt (default: 1)")
    md.add_argument(
        "--barostat", metavar="KIND",
        help="what varies of the cell in npt: isotropic, semi-isotropic (xy, z), anisotropic (x, y, z) or flexible "
        "(angles too) (default: isotropic)",
    )  # fmt: skip
    md.add_argument("--barostat-time", type=float, metavar="PS", help="in which the volume relaxes (default: 1)")
    md.add_argument(
        "--barostat-compressibility", type=float, metavar="PER_BAR",
        help="about that of the material; averages do not depend on it (default: 4.6e-5, water)",
    )  # fmt: skip
    md.add_argument(
        "--remove-drift", type=int, metavar="STEPS",
        help="remove the motion of the centre of mass every so many steps (default: never)",
    )  # fmt: skip
    md.add_argument("--hydrogen-mass", type=float, metavar="AMU", help="move mass to hydrogens from their neighbors")
    add_precision(md)
    md.add_argument("--inner", metavar="MODEL", help="'springs', or a faster model: its forces act in short steps")
    md.add_argument("--inner-steps", type=int, metavar="N", help="inner steps of each time step (default: 4)")
    md.add_argument("--seed", type=int, default=0, help="seed of velocities and noise (default: 0)")
    md.add_argument("--replicas", type=int, default=1, help="replicas in one batch; the k-th has seed + k (default: 1)")
    md.add_argument("--every", type=int, help="steps between frames (default: a thousandth of all, 10 to 100)")
    md.add_argument("--output", default="md", help="prefix of the files, or a folder (default: md)")
    md.add_argument(
        "--trajectory", action="append", default=[], metavar="FILE",
        help=".xyz, .extxyz, .traj, .dcd or .xtc, repeatable (default: the prefix + .xyz)",
    )  # fmt: skip
    md.add_argument("--isolated", action="store_true", help="simulate one molecule without its periodic cell")
    md.add_argument("--minimize", action="store_true", help="relax the start structure first")
    md.add_argument("--report", action="store_true", help="write a page with a movie and plots: prefix + .html")
    md.add_argument("--restart", action="store_true", help="continue from the prefix + .restart")
    md.add_argument(
        "--restart-every", type=int, metavar="STEPS", help="steps between restart files (default: 1/20 of all)"
    )
    md.add_argument("--stop-if-unknown", action="store_true", help="stop when a calibrated model warns")
    add_coulomb(md)
    add_charges(md)
    add_device(md, dtype=None)
    check = command("stability", _stability, "test a model in dynamics: replicas at several temperatures")
    add_model(check)
    check.add_argument("frames", help="start structures, any format of ASE or of data; some of them as file@10:20")
    check.add_argument("--temperatures", default="300,600", metavar="K,K", help="K, comma-separated (default: 300,600)")
    check.add_argument("--time", type=float, default=10.0, help="length of each run in ps (default: 10)")
    check.add_argument("--replicas", type=int, default=8, help="runs at each temperature, side by side (default: 8)")
    check.add_argument("--timestep", type=float, default=0.5, help="fs (default: 0.5)")
    check.add_argument("--friction", type=float, help="friction of Langevin dynamics, 1/ps (default: 1)")
    check.add_argument("--seed", type=int, default=0, help="seed of the noise; run k has seed + k (default: 0)")
    check.add_argument("--output", default="stability", help="prefix of the files, or a folder (default: stability)")
    add_coulomb(check)
    add_charges(check)
    check.add_argument("--fail", action="store_true", help="exit with 1 when a replica broke, for scripts")
    add_devices(check)


@names_options
def _md(options: argparse.Namespace) -> None:
    import signal
    import threading

    from ..md import MDOptions, run_md
    from ..md.output import drift_text, speed_text

    timestep = options.timestep
    if timestep is None:
        timestep = 0.5 if options.inner is None else 0.5 * (options.inner_steps or 4)
    steps = options.steps if options.steps is not None else _steps(options.time, timestep)
    chosen = MDOptions(
        steps=steps,
        timestep=timestep,
        ensemble=options.ensemble,
        temperature=options.temperature,
        friction=options.friction,
        pressure=options.pressure,
        barostat=options.barostat,
        barostat_time=options.barostat_time,
        barostat_compressibility=options.barostat_compressibility,
        remove_drift=options.remove_drift,
        hydrogen_mass=options.hydrogen_mass,
        inner_steps=options.inner_steps,
        precision=options.precision,
        seed=options.seed,
        replicas=options.replicas,
        every=options.every,
        output=options.output,
        trajectories=tuple(options.trajectory),
        restart=options.restart,
        restart_every=options.restart_every,
        minimize=options.minimize,
        report=options.report,
        stop_if_unknown=options.stop_if_unknown,
    )
    _spare_inputs(chosen, options.model, options.start)
    start = _start(options)
    # SIGTERM, which queueing systems send first, stops the run like Ctrl-C, so that it writes a restart file
    alone = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if alone else None
    console = make_console()
    try:
        result = run_md(
            options.model,
            start,
            chosen,
            charge=options.charge,
            spin=options.spin,
            console=console,
            inner=options.inner,
            start=_origin(options),
            **opening(options, [options.model]),
        )
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)
    temperatures = [row.temperature_K for replica in result.replicas for row in replica.rows]
    mean = sum(temperatures) / len(temperatures)
    found = [f"mean temperature {mean:.1f} K", f"drift {drift_text(result.drift)}"]
    if chosen.ensemble == "npt":
        halves = [replica.rows[len(replica.rows) // 2 :] for replica in result.replicas]
        densities = [row.density_g_cm3 for rows in halves for row in rows]
        found.append(f"density {sum(densities) / len(densities):.3f} g/cm³ in the second half")
    if speed := speed_text(result.ns_per_day):
        found.append(speed if options.replicas == 1 else f"{speed} each")
    if novelty := result.watch.summary():
        found.append(novelty)
    lines = [", ".join(found)]
    first = [replica.rows[0].temperature_K for replica in result.replicas]
    if chosen.ensemble == "nve" and mean < 0.8 * sum(first) / len(first):
        lines.append(
            "at constant energy a relaxed structure takes up about half of its initial kinetic energy; "
            "--ensemble nvt keeps the temperature"
        )
    lines.append("wrote " + ", ".join(map(str, result.files)))
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _start(options: argparse.Namespace) -> Atoms:
    """Return the start structure, from a file or from --smiles."""
    from ..errors import BadConfig

    if (options.start is None) == (options.smiles is None):
        raise BadConfig(
            "give a start structure, or a molecule by --smiles" + ("" if options.start is None else ", not both")
        )
    if options.smiles is None:
        atoms = read_structure(options.start)
    else:
        from ..data.structures import from_smiles

        atoms = from_smiles(options.smiles, options.seed)
    if options.isolated:
        if options.ensemble == "npt":
            raise BadConfig("--isolated removes the cell, and --ensemble npt needs one: leave one of the two out")
        from ..adapters.isolated import made_whole

        if not atoms.pbc.any():
            raise BadConfig("--isolated has no effect: the start is not periodic; leave it out")
        atoms.positions = made_whole(atoms.positions, atoms.cell.array, atoms.pbc)
        atoms.cell, atoms.pbc = None, False
    refuse_other_charge(options, atoms, options.start or "the SMILES")
    return atoms


def _origin(options: argparse.Namespace) -> str:
    start = options.start or f"SMILES {options.smiles}"
    return f"{start}, without its cell" if options.isolated else start


def _spare_inputs(options: MDOptions, model: str, start: str | None) -> None:
    """Refuse to overwrite the model or the start structure."""
    from ..core.files import spare_inputs

    # a restart continues in the same files, and may take elements and cell from its trajectory
    inputs = [model] if options.restart or start is None else [model, split_index(start)[0]]
    spare_inputs(options.files(), map(Path, inputs), "choose another --output or --trajectory")


def _steps(time: float | None, timestep: float) -> int:
    """Return the number of steps of a time in ps, 1 ps if None."""
    from ..errors import BadConfig

    time = 1.0 if time is None else time
    if not (0 <= time < 1e9 and timestep > 0):
        raise BadConfig(f"time must be at least 0 and timestep positive, got {time} ps and {timestep} fs")
    return round(1000 * time / timestep)


# --- stability ---


@names_options
def _stability(options: argparse.Namespace) -> int:
    from ..md import StabilityReport, check_stability

    inputs = [options.model, split_index(options.frames)[0]]
    frames, numbers = read_frames(options.frames)
    prefix = output_prefix(options.output, "stability", StabilityReport.files, inputs)
    console, unfinished = make_console(), prefix.with_name(prefix.name + "_unfinished")

    def save(found: StabilityReport) -> None:
        try:
            found.write(unfinished, keep=False)
        except OSError as error:
            console.print(f"note: what is found so far was not saved: {error}", highlight=False, markup=False)

    report = check_stability(
        options.model,
        frames,
        _temperatures(options.temperatures),
        options.time,
        options.replicas,
        options.timestep,
        options.friction,
        options.seed,
        options.devices,
        charge=options.charge,
        spin=options.spin,
        console=console,
        numbers=numbers,
        save=save,
        **opening(options, [options.model]),
    )
    written = report.write(prefix)
    for path in StabilityReport.files(unfinished):
        with suppress(OSError):
            path.unlink()
    _print(report, f"{options.model}: {report.time:g} ps from {options.frames}")
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True, markup=False)
    return int(options.fail and not report.survived)


def _temperatures(text: str) -> list[float]:
    from ..errors import BadConfig

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadConfig(f"--temperatures: must be numbers separated by commas, as in 300,600, got {text}") from None


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
