"""Run by test_tensornet_gpu.py in a process of its own, in Triton's interpreter: prints JSON, a line a case."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import torch

from torchmdnet2 import Potential, System
from torchmdnet2.kernels.interfaces import Atoms, Edges
from torchmdnet2.models.tensornet import gpu as tensornet
from torchmdnet2.models.tensornet import weights
from torchmdnet2.models.tensornet.gpu import Block, FusedTensorNet, MessageTile, Tiles
from torchmdnet2.models.tensornet.weights import HALVES_BELOW, FrozenTensorNet
from torchmdnet2.neighbors import neighbor_list

CUTOFF = 4.5
BOX = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
TINY = [[2.1, 0, 0], [0.4, 2.3, 0], [0, 0.5, 2.2]]  # several images of each atom, and of itself
MIXED = {
    name: Block(4, 16, 32, 4, 1, 2) if isinstance(shape, Block) else MessageTile(2, 4, 16, 4)
    for name, shape in vars(Tiles()).items()
    if name not in ("readout", "overlap", "elements") and not name.startswith("element_")
}


def split_fp16(tiles: Tiles, shape: Block) -> Tiles:
    """Products in half precision: all but the last of the read-out, whose block takes all columns."""
    names = [k for k, v in vars(tiles).items() if isinstance(v, Block) and k != "readout"]
    return replace(tiles, **dict.fromkeys(names, shape))


def potential(group: str, channels: int, **options: Any) -> Potential:
    torch.manual_seed(3)
    model = {"name": "tensornet", "hidden_channels": channels, "num_layers": 2, "num_rbf": 16, "cutoff": CUTOFF}
    result = Potential.from_config({"model": {**model, "max_z": 10, "group": group, **options}}).eval()
    with torch.no_grad():
        for p in result.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return result


def system(num_atoms: int, cell: list | None, charge: float) -> System:
    generator = torch.Generator().manual_seed(num_atoms)
    lattice = torch.eye(3).double() * 4 if cell is None else torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator) @ lattice
    z = torch.randint(1, 9, (num_atoms,), generator=generator)
    return System(z=z, pos=pos, cell=None if cell is None else lattice[None], charge=torch.tensor([charge]))


def water(num_atoms: int, elements: tuple[int, ...] = (1, 8)) -> System:
    """A charged cell of these elements in turn, no two atoms nearer than atoms come."""
    generator = torch.Generator().manual_seed(num_atoms)
    lattice = torch.tensor(BOX, dtype=torch.float64)
    sites = torch.tensor([[0, 0, 0], [2, 2, 0], [2, 0, 2], [0, 2, 2], [1, 1, 1]], dtype=torch.float64) / 4
    pos = sites[:num_atoms] @ lattice + 0.3 * torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator)
    z = torch.tensor([elements[k % len(elements)] for k in range(num_atoms)])
    return System(z=z, pos=pos, cell=lattice[None], charge=torch.tensor([1.0]))


def case(
    name: str,
    group: str,
    atoms: System,
    tiles: Tiles,
    channels: int = 32,
    scale: float = 1.0,
    mixed: bool = False,
    **options: Any,
) -> None:
    """As `compare`, for a random TensorNet."""
    model = potential(group, channels, **options)
    fused = FusedTensorNet(FrozenTensorNet(model.representation, model.head, scale, "cpu", mixed))
    compare(name, model, fused, atoms, tiles, scale)


def same_bits_in_words(name: str, group: str, atoms: System, tiles: Tiles) -> None:
    """As `case`; without words (triton_algebra.py) all results must have the same bits."""
    model = potential(group, 32)
    fused = FusedTensorNet(FrozenTensorNet(model.representation, model.head, 1.0, "cpu"))
    assert fused._in_words(tiles, "update")
    in_words = compare(name, model, fused, atoms, tiles, 1.0)
    fused.sole_readers = ()
    for of_words, of_numbers in zip(
        in_words, compare(f"{name}, no words", model, fused, atoms, tiles, 1.0), strict=True
    ):
        assert torch.equal(of_words, of_numbers)


def compare(
    name: str, model: Potential, fused: FusedTensorNet, atoms: System, tiles: Tiles, scale: float
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Print errors of energies (in eV times scale), forces and stress; return energies, forces and virials."""
    exact = copy.deepcopy(model).double()
    periodic = bool(atoms.pbc.any())
    expected = exact(atoms, stress=periodic)
    edges = neighbor_list(atoms, model.cutoff)
    n, capacity = atoms.num_atoms, edges.num_edges + 16
    buffers = fused.allocate(n, capacity, tiles)
    for value in vars(buffers).values():  # whatever is read before it is written shows
        for t in value if isinstance(value, list) else [value]:
            t.fill_(float("nan") if t.is_floating_point() else 7)
    sender = torch.zeros(capacity, dtype=torch.int32)
    sender[: edges.num_edges] = edges.edge_index[1]
    vec = torch.full((capacity, 3), float("nan"))
    vec[: edges.num_edges] = edges.vectors(atoms).float()
    factor = fused.charge_input(atoms.charge).float().expand(n).contiguous()
    ptr = torch.tensor([0, n], dtype=torch.int32)
    places = Atoms(atoms.z.int(), factor, atoms.batch.int(), ptr, atoms.pos)
    fused.run(buffers, tiles, places, Edges(edges.row_ptr.int(), sender, vec, model.cutoff), with_virial=True)
    for computed in (buffers.energy, buffers.forces, buffers.virial):
        computed *= fused.unit / scale
    energies = buffers.energy.double()
    if model.subtract_isolated:
        energies = energies - exact.isolated_energies()[atoms.z].detach()
    eager = model(atoms.to(dtype=torch.float32)).forces - expected.forces
    result = {
        "case": name,
        "energy": float((energies - expected.atom_energies).abs().max()),
        "energy_rms": float((energies - expected.atom_energies).square().mean().sqrt()),
        "forces": float((buffers.forces - expected.forces).abs().max()),
        "eager_forces": float(eager.abs().max()),
        "largest_force": float(expected.forces.abs().max()),
    }
    if periodic:
        stress = buffers.virial.double().reshape(-1, 3, 3).sum(0) / atoms.volume[0]
        result["stress"] = float((stress - expected.stress[0]).abs().max() / expected.stress.abs().max())
    print(json.dumps(result), flush=True)
    return buffers.energy, buffers.forces, buffers.virial


if __name__ == "__main__":
    tens, hundreds = Tiles.for_atoms(9, 32), Tiles.for_atoms(200, 32)
    case("molecule, O(3)", "O(3)", system(3, None, 0.0), tens)
    case("ion in a triclinic cell, O(3)", "O(3)", system(3, BOX, 1.0), tens)
    case("ion in a triclinic cell, SO(3)", "SO(3)", system(5, BOX, -1.0), hundreds)
    case("images of itself, O(3)", "O(3)", system(2, TINY, 0.0), hundreds)
    case("one atom", "O(3)", system(1, None, 0.0), hundreds)
    case("rows and lanes side by side", "O(3)", system(5, BOX, 0.0), replace(tens, **MIXED))
    heavy = system(5, BOX, 1.0).replace(z=torch.tensor([1, 127, 128, 199, 6]))
    case("dozens of atoms", "O(3)", heavy, Tiles.for_atoms(50, 32), max_z=200)
    same_bits_in_words("Tensor Cores", "SO(3)", system(4, BOX, 0.0), Tiles.for_atoms(100_000, 32))
    same_bits_in_words("Tensor Cores, some products", "O(3)", system(4, BOX, 1.0), Tiles.for_atoms(2489, 32))
    case("256 channels", "O(3)", system(2, None, 0.0), Tiles.for_atoms(100_000, 256), 256)
    case("split fp16, parts of K", "SO(3)", system(3, BOX, -1.0), split_fp16(hundreds, Block(8, 32, 32, 4, 1, 2)))
    case(
        "split fp16, two programs",
        "O(3)",
        system(9, None, 0.0),
        split_fp16(Tiles.for_atoms(1000, 32), Block(8, 32, 16, 2)),
    )
    case(
        "split fp16, tiny energies",
        "O(3)",
        system(2, None, 0.0),
        split_fp16(hundreds, Block(8, 32, 32, 4, 1, 2)),
        32,
        1e-9,
    )
    # the kernels of few atoms, those of some, and Tensor Cores: each has its own products after the norm
    case("logarithms, few atoms", "O(3)", system(3, BOX, 0.0), tens, norm="log")
    case(
        "logarithms, split fp16",
        "SO(3)",
        system(3, BOX, 1.0),
        split_fp16(hundreds, Block(8, 32, 32, 4, 1, 2)),
        norm="log",
    )
    case("logarithms, Tensor Cores", "O(3)", system(4, BOX, 0.0), Tiles.for_atoms(100_000, 32), norm="log")
    linear = {"norm": "log", "linear_readout": True}
    case("linear read-out, few atoms", "O(3)", system(3, BOX, 0.0), tens, **linear)
    case(
        "linear read-out, split fp16",
        "SO(3)",
        system(9, None, 1.0),
        split_fp16(hundreds, Block(8, 32, 32, 4, 1, 2)),
        **linear,
    )
    case("linear read-out, Tensor Cores", "O(3)", system(4, BOX, 0.0), Tiles.for_atoms(100_000, 32), 32, 1e-3, **linear)
    # several rows, or several edges of a row, at a time; elements that are not there
    many, rows = Tiles.for_atoms(10**5, 128), MessageTile(2, 2, 32, 1)
    case("by elements", "O(3)", water(5), replace(many, elements=(1, 8)), 128)
    by_rows = replace(many, elements=(1, 6, 7, 8, 9), element_edges=rows)
    case("by elements, several rows, logarithms", "SO(3)", water(4, (1, 6, 8)), by_rows, 128, norm="log")
    # weights, and maps of the elements alone, that do not fit in halves: products in TF32
    tensornet.HALVES_BELOW = 0.0
    case("elements, maps in TF32", "O(3)", water(3), replace(Tiles.for_atoms(10**5, 64), elements=(1, 8)), 64)
    weights.HALVES_BELOW = 0.0
    case("Tensor Cores, in TF32", "SO(3)", system(4, BOX, 0.0), Tiles.for_atoms(10**5, 32))
    tensornet.HALVES_BELOW = weights.HALVES_BELOW = HALVES_BELOW
    case("mixed precision, few atoms", "O(3)", system(3, BOX, 0.0), Tiles.for_atoms(9, 32, True), mixed=True, **linear)
    case("mixed precision, split fp16", "O(3)", system(3, BOX, 1.0), Tiles.for_atoms(1000, 32, True), mixed=True)
    case("mixed precision, Tensor Cores", "SO(3)", system(4, BOX, 0.0), Tiles.for_atoms(10**5, 32, True), mixed=True)
    many = replace(Tiles.for_atoms(10**5, 64, True), elements=(1, 8))
    case("mixed precision, by elements", "O(3)", water(5), many, 64, mixed=True)
    three = replace(Tiles.for_atoms(10**5, 128, True), elements=(1, 6, 8))
    case("mixed precision, by elements, three", "O(3)", water(5, (1, 6, 8)), three, 128, mixed=True)
