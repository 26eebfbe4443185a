"""The model, the systems and the clock of the benchmarks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchmdnet2 import Potential, System, benchmark
from torchmdnet2.benchmark import water_box
from torchmdnet2.potential.prior import Prior

__all__ = [
    "COMPOSED",
    "MODEL",
    "PDB",
    "WATER",
    "forget",
    "make_potential",
    "named_systems",
    "once",
    "peak",
    "read_pdb",
    "sides",
    "timed",
    "water_box",
]

PDB = ("alanine_dipeptide", "testosterone", "chignolin", "dhfr", "factorIX", "stmv")
WATER = (7, 15, 32, 70)  # molecules along each side: 1,029, 10,125, 98,304 and 1,029,000 atoms
NUMBERS = {"H": 1, "C": 6, "N": 7, "O": 8, "P": 15, "S": 16, "NA": 11, "CL": 17, "MG": 12, "ZN": 30, "K": 19, "CA": 20}
MODEL = benchmark.STANDARD_MODEL


CHARGES = {"H": 0.41, "C": 0.0, "N": 0.0, "O": -0.82, "S": 0.0}
COMPOSED: dict[str, list[dict[str, Any]]] = {
    "plain": [],
    "zbl": [{"name": "zbl", "cutoff": 4.0}],
    "d2": [{"name": "d2", "cutoff": 9.0}],
    "reaction_field": [{"name": "coulomb", "charges": CHARGES, "method": "reaction_field", "cutoff": 9.0}],
    "d3": [{"name": "d3", "elements": [1, 6, 7, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 9.0}],
}
"""Priors added to the network, by name; "morse" is that of docs/extending.md."""
COMPOSED["zbl+d3+reaction_field"] = [*COMPOSED["zbl"], *COMPOSED["d3"], *COMPOSED["reaction_field"]]
_PREDICTED = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 9.0}
COMPOSED["zbl+d3+predicted"] = [*COMPOSED["zbl"], *COMPOSED["d3"], _PREDICTED]
COMPOSED["pme"] = [{"name": "coulomb", "charges": CHARGES, "method": "pme", "cutoff": 9.0, "accuracy": 1e-6}]
COMPOSED["log+linear"] = []
MODELS: dict[str, dict[str, Any]] = {"log+linear": {"norm": "log", "linear_readout": True}}
"""Changes of the network, by names in COMPOSED: the settings that extrapolate best."""


class Morse(Prior):
    """The prior of docs/extending.md, as users write it: without kernels."""

    cutoff = 4.0

    def forward(self, system: System, neighbors: Any, charges: Any = None) -> torch.Tensor:
        d = neighbors.distances(system).double()
        pair = 0.2 * ((1 - torch.exp(-1.5 * (d - 1.2))) ** 2 - 1) * (1 - (d / self.cutoff) ** 2) ** 3
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


def make_potential(composed: str = "plain") -> Potential:
    """The model with random weights that are always the same, and priors or changes of it by their name in COMPOSED."""
    torch.manual_seed(1)
    priors = COMPOSED.get(composed, [])
    heads = [{"name": "charges"}] if any(prior.get("charges") == "predicted" for prior in priors) else []
    model = {**MODEL, **MODELS.get(composed, {})}
    potential = Potential.from_config({"model": model, "priors": priors, "properties": heads})
    if composed == "morse":
        potential.priors = torch.nn.ModuleList([Morse()])  # type: ignore[assignment]
    return potential.eval().requires_grad_(False)


def read_pdb(path: Path) -> System:
    """Elements and positions of a PDB file, in vacuum."""
    z, pos = [], []
    for line in path.read_text().splitlines():
        if line.startswith(("ATOM", "HETATM")):
            element = line[76:78].strip().upper() or line[12:16].strip().lstrip("0123456789")[0].upper()
            z.append(NUMBERS.get(element, 6))
            pos.append([float(line[k : k + 8]) for k in (30, 38, 46)])
    return System(z=torch.tensor(z), pos=torch.tensor(pos, dtype=torch.float32))


def sides(water: str) -> list[int]:
    """Numbers with commas; none of an empty text."""
    return [int(side) for side in water.split(",") if side]


def more_elements(system: System, number: int) -> System:
    """A system of hydrogen and oxygen where carbon, nitrogen, … take the place of a twelfth of the atoms each."""
    z = system.z.clone()
    for k, element in enumerate((6, 7, 16, 15)[: number - 2]):
        z[5 * k :: 12] = element
    return system.replace(z=z)


def named_systems(
    folder: Path | None, water: str, copies: int = 0, elements: str = ""
) -> dict[str, Callable[[], System]]:
    """Functions that make the systems, by name: PDB files, water boxes, those with so many elements, copies of a
    molecule in one batch."""

    def many(path: Path) -> System:
        return System.concatenate([read_pdb(path)] * copies)

    systems: dict[str, Callable[[], System]] = {}
    for name in PDB if folder else ():
        path = Path(folder or ".") / f"{name}.pdb"
        if path.exists():
            systems[name] = lambda path=path: read_pdb(path)  # type: ignore[misc]
            if name == "alanine_dipeptide" and copies:
                systems[f"{copies} x {name}"] = lambda path=path: many(path)  # type: ignore[misc]
    for side in sides(water):
        name = f"water {3 * side**3}"
        systems[name] = lambda side=side: water_box(side)  # type: ignore[misc]
        for b in sides(elements):
            systems[f"{name}, {b} elements"] = lambda side=side, b=b: more_elements(water_box(side), b)  # type: ignore[misc]
    return systems


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> float:
    """Largest memory that was allocated on the GPU, GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def forget() -> None:
    """Free unused memory, and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(step: Callable[[], Any], seconds: float = 0.4, most: int = 300) -> dict[str, float]:
    """Milliseconds per step, as `torchmdnet2.benchmark.timed`, on the GPU where there is one."""
    return benchmark.timed(step, "cuda" if torch.cuda.is_available() else "cpu", seconds, most)


def once(step: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds of one call."""
    synchronize()
    start = time.perf_counter()
    result = step()
    synchronize()
    return result, time.perf_counter() - start
