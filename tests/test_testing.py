"""The conformance checks must catch what they are for: each test breaks one thing and expects the check to say so."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import ELEMENTS, tiny_potential
from torch import nn

from torchmdnet2 import Potential, System
from torchmdnet2.neighbors import NeighborList, neighbor_list
from torchmdnet2.priors import Atomref, Prior
from torchmdnet2.testing import POTENTIAL_CHECKS, check_neighbor_backend, check_potential, check_prior, example_systems


class Pairs(Prior):
    """A repulsion that is right: smooth at its cutoff, half of each pair to each atom."""

    cutoff = 3.5

    def pair_energy(self, d):
        return torch.exp(-d) * (1 - d / self.cutoff).clamp(min=0) ** 3

    def forward(self, system, neighbors):
        energies = self.pair_energy(neighbors.distances(system).double())
        return energies.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], energies / 2)


def test_good_ones_pass():
    check_prior(Pairs())
    check_prior(Atomref({1: -13.6, 8: -2041.8}))
    check_potential(tiny_potential(), [example_systems(ELEMENTS)["molecule"]])
    check_neighbor_backend("reference")
    check_neighbor_backend("vesin")


class Charged(Pairs):
    """The same between charges that the model predicts."""

    uses_charges = True

    def forward(self, system, neighbors, charges):
        receiver, sender = neighbors.edge_index
        energies = self.pair_energy(neighbors.distances(system).double()) * charges[receiver] * charges[sender]
        return energies.new_zeros(system.num_atoms).index_add(0, receiver, energies / 2)


def test_priors_of_predicted_charges_can_be_checked():
    systems = example_systems([1, 8])
    check_prior(Charged(), [systems["ion"], systems["slab"]])

    class Square(Charged):
        def forward(self, system, neighbors, charges):
            return super().forward(system, neighbors, charges) + charges.sum() ** 2  # of all structures of the batch

    with fails("the energy differs in a batch"):
        check_prior(Square(), [systems["ion"]])


def fails(words: str):
    return pytest.raises(AssertionError, match=re.escape(words))


def test_truncated_pair_energy_jumps():
    class Truncated(Pairs):
        def pair_energy(self, d):
            return torch.exp(-d)

    with fails("a force jumps when a pair crosses 3.5 Å: 0.0302"):
        check_prior(Truncated())


def test_detached_distance_gives_wrong_forces():
    class Detached(Pairs):
        def pair_energy(self, d):
            return super().pair_energy(d.detach()) + super().pair_energy(d)

    with fails("forces differ from −dE/dx"):
        check_prior(Detached())


def test_cell_that_does_not_feel_strain():
    class FrozenShift(Pairs):
        def forward(self, system, neighbors):
            return super().forward(system.replace(cell=system.cell.detach()), neighbors)

    with fails("stress × volume differs from the strain derivative"):
        check_prior(FrozenShift())


def test_direction_dependent_energy():
    class Field(Pairs):
        def forward(self, system, neighbors):
            up = neighbors.vectors(system)[:, 2].double()
            tilt = up * up * self.pair_energy(neighbors.distances(system).double())
            return super().forward(system, neighbors).index_add(0, neighbors.edge_index[0], tilt)

    with fails("the energy of the rotated structure differs"):
        check_prior(Field())


def test_mirror_dependent_energy():
    class Handed(nn.Module):
        def forward(self, prior, system, neighbors):
            v = neighbors.vectors(system).double()
            weight = prior.pair_energy(neighbors.distances(system).double())[:, None] * v
            total = [
                torch.zeros(system.num_atoms, 3).double().index_add(0, neighbors.edge_index[0], weight * s[:, None])
                for s in (v.norm(dim=1) ** k for k in (0, 1, 2))
            ]
            return torch.linalg.det(torch.stack(total, 1))

    class Chiral(Pairs):
        def forward(self, system, neighbors):
            return super().forward(system, neighbors) + Handed()(self, system, neighbors)

    with fails("the energy of the mirrored structure differs"):
        check_prior(Chiral())


def test_cell_of_one_image():
    """Only the nearest image of each atom: right in wide cells, wrong in narrow ones."""

    class Nearest(Pairs):
        def forward(self, system, neighbors):
            pairs = neighbors.edge_index.T.tolist()
            d = neighbors.distances(system).double()
            best: dict[tuple, int] = {}
            for k, pair in enumerate(map(tuple, pairs)):
                if pair not in best or d[k] < d[best[pair]]:
                    best[pair] = k
            keep = torch.tensor(sorted(best.values()), dtype=torch.long)
            energies = self.pair_energy(d[keep])
            receiver = neighbors.edge_index[0, keep]
            return energies.new_zeros(system.num_atoms).index_add(0, receiver, energies / 2)

    with fails("the energy of a supercell differs"):
        check_prior(Nearest(), [example_systems([1])["tiny cell"]])


def test_jump_inside_a_head():
    """Cutoffs of terms inside a head are found and crossed too: a reaction field that ends abruptly."""
    model = {"name": "tensornet2", "hidden_channels": 8, "num_layers": 0, "num_rbf": 4, "q_dim": 1, "cutoff": 3.0}
    head = {"name": "scalar_coulomb", "q_weights": [1.0], "method": "reaction_field", "coulomb_cutoff": 5.5}
    torch.manual_seed(0)
    for width in (1.0, 0.0):
        config = {"model": {**model, "max_z": 9}, "head": {**head, "switch_width": width}, "elements": [1, 8]}
        potential = Potential.from_config(config).double().eval()
        if width:
            POTENTIAL_CHECKS["smooth_at_the_cutoff"](potential)
        else:
            with fails("a force jumps when a pair crosses 5.5 Å"):
                POTENTIAL_CHECKS["smooth_at_the_cutoff"](potential)


def test_leak_between_structures():
    class Leak(Pairs):
        def forward(self, system, neighbors):
            return super().forward(system, neighbors) * system.num_systems

    with fails("the energy differs in a batch"):
        check_prior(Leak(), [example_systems([1])["molecule"]])


def test_dependence_on_the_order_of_atoms():
    class Ranked(Pairs):
        def forward(self, system, neighbors):
            return super().forward(system, neighbors) * (1 + torch.arange(system.num_atoms))

    with fails("depend"):
        check_prior(Ranked(), [example_systems([1, 6])["molecule"]])


def test_isolated_atom_with_energy():
    class Biased(Potential):
        def _network_energies(self, *given):
            return super()._network_energies(*given) + 1e-9

    source = tiny_potential()
    biased = Biased(source.representation, source.head, elements=ELEMENTS)
    with fails("an isolated atom does not have its reference energy: 1e-09 eV"):
        check_potential(biased)


def test_pole_at_coincident_atoms():
    class Pole(Pairs):
        def pair_energy(self, d):
            return super().pair_energy(d) / d

    with fails("two atoms 0 Å apart"):
        check_prior(Pole())


def test_unchecked_input():
    class Silent(Potential):
        def check_elements(self, z):
            pass

    source = tiny_potential()
    with fails("no UnknownElement about atom 2 was raised"):
        check_potential(Silent(source.representation, source.head, elements=ELEMENTS))


def test_a_stress_without_a_volume():
    class Given(Potential):
        def forward(self, system, stress=False, **options):
            return super().forward(system, stress=stress and not bool((system.volume == 0).any()), **options)

    source = tiny_potential()
    with fails("a structure without a volume was given a stress instead of a ValueError"):
        check_potential(Given(source.representation, source.head, elements=ELEMENTS))


def test_changed_input():
    class Wrapping(Pairs):
        def forward(self, system, neighbors):
            system.charge += 1.0
            return super().forward(system, neighbors)

    with fails("charge was changed"):
        check_prior(Wrapping(), [example_systems([1])["molecule"]])


@pytest.mark.parametrize("fault", ["missing", "extra", "unsorted", "twice"])
def test_wrong_neighbor_search(fault):
    def search(system: System, cutoff: float, half: bool = False) -> NeighborList:
        right = neighbor_list(system, cutoff + (0.5 if fault == "extra" else 0.0), half=half)
        keep = torch.arange(right.num_edges)
        if right.num_edges > 1:
            keep = {"missing": keep[1:], "unsorted": keep.flip(0), "twice": torch.cat([keep[:1], keep[:-1]])}.get(
                fault, keep
            )
        return NeighborList(right.edge_index[:, keep], right.shift[keep], right.row_ptr, cutoff, half)

    messages = {
        "missing": "1 edges are missing",
        "extra": "should not be there",
        "unsorted": "not sorted",
        "twice": "1 edges are listed twice",
    }
    with fails(messages[fault]):
        check_neighbor_backend(search)
