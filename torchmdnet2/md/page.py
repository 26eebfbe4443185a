"""The page of a simulation: one HTML file with the moving molecule, temperature, energy, bonds and distances.

The molecule is drawn by 3Dmol.js (N. Rego, D. Koes, Bioinformatics 2015, 31, 1322), which the page carries within it:
it works without a network.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core import html_page as page
from ..core.files import atomic_write
from ..neighbors import neighbor_list
from ..system import System
from ..units import AMU_A3
from .guard import Bonds
from .output import TableRow, drift_text, speed_text

if TYPE_CHECKING:
    from ase import Atoms
    from matplotlib.axes import Axes

__all__ = ["Simulated", "distances", "read_frames", "write_page"]

MOST_FRAMES = 250
MOST_POSITIONS = 200_000  # atoms times frames on a page, of about 30 bytes each
READABLE = (".xyz", ".extxyz", ".traj")
_NO_FRAMES = f"The molecule is not shown: no trajectory in one of the formats {', '.join(READABLE)} was written."
_FARTHEST = 8.0  # Å, of the distances in the histogram
_MOST_KINDS = 3  # elements between which there are radial distributions
_BEYOND = 2.0  # Å, from which on the highest value is shown
_STICKS = 2000  # atoms above which only lines are drawn

_STYLE = """<style>
#movie { position: relative; width: 100%; height: 26rem; box-shadow: 0 0 0 1px #ccd }
.controls { display: flex; gap: .8rem; align-items: center; margin: .4rem 0 } .controls input { flex: 1 }
.controls button { width: 4.5rem } #time { min-width: 6rem; text-align: right }
#movie ~ .pictures img { width: 44rem }
@media print { #movie, .controls { display: none } }
</style>"""


@dataclass(frozen=True)
class Simulated:
    """The results of a simulation that a page shows.

    Attributes:
        title: in plain text.
        settings: what was simulated, in plain text.
        origin: what it was simulated with and from: "model" -> its file, "start" -> the file of the structure, ….
        frames: of the first replica, in order, with `time_ps` in their info; none where no trajectory can be read.
        replicas: rows of each replica's table.
        drifts: of each replica, eV/atom/ps.
        ns_per_day: speed, nan where it is not known.
        curves: the plot of temperature and energy, PNG; None where it could not be drawn.
    """

    title: str
    settings: str
    origin: Mapping[str, str]
    frames: Sequence[Atoms]
    replicas: Sequence[Sequence[TableRow]]
    drifts: Sequence[float]
    ns_per_day: float
    curves: bytes | None


def read_frames(paths: Sequence[Path], rows: int) -> list[Atoms]:
    """Return evenly spread frames of a trajectory, as many as a page shows.

    Args:
        paths: the trajectory in one or more formats.
        rows: about how many frames it has.

    Returns:
        The frames; none if no file is in a format that ASE reads with its times (.xyz, .extxyz, .traj).
    """
    from ase.io import iread

    readable = [path for path in paths if path.suffix in READABLE and path.exists()]
    if not readable:
        return []
    found: list[Atoms] = []
    stride = 0
    for k, atoms in enumerate(iread(readable[0], format=None if readable[0].suffix == ".traj" else "extxyz")):
        stride = stride or -(-rows // max(2, min(MOST_FRAMES, MOST_POSITIONS // max(len(atoms), 1))))
        if k % stride == 0:
            found.append(atoms)
    return found


def write_page(path: Path, simulated: Simulated) -> None:
    """Write the page.

    Args:
        path: of the HTML file.
        simulated: what it is made from.
    """
    rows = [
        [k, f"{table[-1].time_ps:.3f}", f"{np.mean([row.temperature_K for row in table]):.1f}", drift_text(drift)]
        for k, (table, drift) in enumerate(zip(simulated.replicas, simulated.drifts, strict=True))
    ]
    frames, curves = simulated.frames, simulated.curves
    parts = [
        page.note("; ".join(filter(None, [simulated.settings, speed_text(simulated.ns_per_day)]))),
        page.facts(simulated.origin),
        _movie(frames) if frames else page.paragraph(_NO_FRAMES),
        page.section(
            "Temperature and energy",
            page.table(["replica", "ps", "mean K", "drift"], rows, left=(3,)),
            page.figures([("temperature and energy over time", curves)] if curves else []),
        ),
    ]
    if frames and frames[0].pbc.all():
        parts.append(_cells(frames, simulated.replicas))
    if frames:
        parts += [_bonds(frames), _distances(frames)]
    atomic_write(path, page.document(simulated.title, *parts))


# --- the molecule ----------------------------------------------------------------------------------------------------


def _movie(frames: Sequence[Atoms]) -> str:
    n = len(frames[0])
    cell = frames[0].cell.cellpar().tolist() if frames[0].pbc.any() and frames[0].cell.rank == 3 else None
    sticks = {"stick": {"radius": 0.12}, "sphere": {"scale": 0.22}}
    data: dict[str, Any] = {
        "xyz": "".join(map(_xyz, frames)),
        "times": [float(frame.info.get("time_ps", k)) for k, frame in enumerate(frames)],
        "cell": cell,
        "style": sticks if n <= _STICKS else {"line": {}},
        "every": 60,
    }
    own = files(__package__) / "viewer"
    scripts = [(own / name).read_text(encoding="utf-8") for name in ("3Dmol-min.js", "movie.js")]
    carried = json.dumps(data).replace("</", "<\\/")
    parts = [
        _STYLE,
        '<div id="movie"></div>',
        '<div class="controls"><button id="play">pause</button>'
        f'<input id="frame" type="range" min="0" max="{len(frames) - 1}" value="0" aria-label="frame">'
        '<span id="time"></span></div>',
        page.note(f"{len(frames)} frames of {n} atoms. Drag to turn, scroll to zoom."),
        f'<script id="frames" type="application/json">{carried}</script>',
        *(f"<script>{text}</script>" for text in scripts),
    ]
    return "\n".join(parts)


def _xyz(atoms: Atoms) -> str:
    shown = atoms.copy()
    if shown.pbc.any():
        shown.wrap()
    lines = (f"{s} {x:.3f} {y:.3f} {z:.3f}\n" for s, (x, y, z) in zip(shown.symbols, shown.positions, strict=True))
    return f"{len(shown)}\n\n" + "".join(lines)


# --- bonds and distances ---------------------------------------------------------------------------------------------


def _bonds(frames: Sequence[Atoms]) -> str:
    kinds = _bond_lengths(frames)
    if not kinds:
        return ""
    rows = [
        [kind, d.shape[1], *(f"{v:.3f}" for v in (d.mean(), d.std(), d.min(), d.max()))] for kind, d in kinds.items()
    ]
    return page.section(
        "Bonds",
        page.note("Bonds of the first frame."),
        page.table(["bond", "number", "mean (Å)", "standard deviation", "shortest", "longest"], rows),
        _drawn(lambda axes: _draw_bonds(axes, kinds), "histogram of bond lengths"),
    )


def _distances(frames: Sequence[Atoms]) -> str:
    name = "Radial distribution" if frames[0].pbc.all() else "Distances"
    return page.section(name, _drawn(lambda axes: _draw_distances(axes, frames), name.lower()))


def _cells(frames: Sequence[Atoms], replicas: Sequence[Sequence[TableRow]]) -> str:
    """Return the section of the cell: mean lengths, angles, volume and density over the second half of the frames of
    the first replica; at constant pressure also those of every replica over time."""
    mass = float(frames[0].get_masses().sum()) * AMU_A3
    cells = np.array([[*frame.cell.cellpar(), frame.get_volume()] for frame in frames])
    cells = np.column_stack([cells, mass / cells[:, 6]])
    half = cells[len(cells) // 2 :]
    names = ["a (Å)", "b (Å)", "c (Å)", "α (°)", "β (°)", "γ (°)", "volume (Å³)", "density (g/cm³)"]
    rows = [
        [name, f"{first:.4g}", f"{mean:.5g}", f"{spread:.2g}"]
        for name, first, mean, spread in zip(names, cells[0], half.mean(0), half.std(0), strict=True)
    ]
    parts = [
        page.note("First replica; means over the second half of the run."),
        page.table(["", "first", "mean", "standard deviation"], rows),
    ]
    if not math.isnan(replicas[0][0].volume_A3):  # the cell changed
        pressures = [float(np.mean([row.pressure_bar for row in rows[len(rows) // 2 :]])) for rows in replicas]
        parts.append(page.note(f"Mean pressure: {', '.join(f'{p:.0f}' for p in pressures)} bar."))
        parts.append(_drawn(lambda axes: _draw_density(axes, replicas), "density over time"))
    return page.section("Cell and density", *parts)


def _draw_density(axes: Axes, replicas: Sequence[Sequence[TableRow]]) -> None:
    for rows in replicas:
        axes.plot([row.time_ps for row in rows], [row.density_g_cm3 for row in rows], lw=0.8)
    axes.set(xlabel="time (ps)", ylabel="density (g/cm³)", title="Density")


def _bond_lengths(frames: Sequence[Atoms]) -> dict[str, NDArray[np.float64]]:
    """Return pair of elements -> lengths [frames, bonds of this kind], Å."""
    bonds = Bonds(System.from_ase(frames[0]))
    if not len(bonds.pairs):
        return {}
    lengths = np.stack([bonds.lengths(frame.positions) for frame in frames])
    symbols = np.array(frames[0].get_chemical_symbols())
    kinds = np.array(["–".join(sorted(symbols[pair])) for pair in bonds.pairs])
    return {str(kind): lengths[:, kinds == kind] for kind in np.unique(kinds)}


def distances(frames: Sequence[Atoms]) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return histograms of the distances between atoms, of up to 50 frames.

    Args:
        frames: of the same atoms; their cells may differ.

    Returns:
        Edges of the bins, Å; of crystals and liquids g(r) by pair of elements (1 at random), of the three elements with
        most atoms; of molecules the neighbors of an atom per Å, named "".
    """
    chosen = frames[:: -(-len(frames) // 50)]
    edges = np.linspace(0.0, _FARTHEST, 161)
    kinds = [symbol for symbol, _ in Counter(frames[0].get_chemical_symbols()).most_common(_MOST_KINDS)]
    symbols = np.array(frames[0].get_chemical_symbols())
    periodic = bool(frames[0].pbc.all())
    pairs = [(one, other) for k, one in enumerate(kinds) for other in kinds[k:]] if periodic else [("", "")]
    found = {f"{one}–{other}" if periodic else "": np.zeros(len(edges) - 1) for one, other in pairs}
    shells = 4 / 3 * math.pi * np.diff(edges**3)
    for atoms in chosen:
        system = System.from_ase(atoms)
        neighbors = neighbor_list(system, _FARTHEST)
        d, (i, j) = neighbors.distances(system).numpy(), neighbors.edge_index.numpy()
        for name, (one, other) in zip(found, pairs, strict=True):
            if not periodic:
                found[name] += np.histogram(d, edges)[0] / len(symbols) / np.diff(edges) / len(chosen)
                continue
            counts = np.histogram(d[(symbols[i] == one) & (symbols[j] == other)], edges)[0]
            at_random = (symbols == one).sum() * (symbols == other).sum() / atoms.get_volume() * shells
            found[name] += counts / at_random / len(chosen)
    return edges, found


def _draw_bonds(axes: Axes, kinds: dict[str, NDArray[np.float64]]) -> None:
    edges = np.arange(min(d.min() for d in kinds.values()), max(d.max() for d in kinds.values()) + 0.01, 0.01)
    for kind, d in kinds.items():
        axes.hist(d.ravel(), bins=edges.tolist(), density=True, histtype="step", label=kind)
    axes.set(xlabel="length (Å)", ylabel="density (1/Å)", title="Bond lengths")
    axes.legend()


def _draw_distances(axes: Axes, frames: Sequence[Atoms]) -> None:
    edges, found = distances(frames)
    periodic = bool(frames[0].pbc.all())
    for name, density in found.items():
        axes.stairs(density, edges, label=name)
    if not periodic:
        end = edges[1:][found[""] > 0].max(initial=1.0)  # molecules end
        axes.set(xlabel="distance (Å)", ylabel="neighbors of an atom per Å", xlim=(0, end))
        return
    # bonds are several times higher than what lies beyond them
    beyond = max(float(density[edges[1:] > _BEYOND].max(initial=1.0)) for density in found.values())
    axes.set(xlabel="distance (Å)", ylabel="g(r)", xlim=(0, _FARTHEST), ylim=(0, 1.2 * beyond))
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.legend()


def _drawn(draw: Callable[[Axes], object], text: str) -> str:
    """Return a plot within the page; nothing if matplotlib is not installed."""
    return "" if page.missing_plots() else page.figures([(text, page.plot_png(draw, (7, 3.2)))])
