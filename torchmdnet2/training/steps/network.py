"""Network energies and forces of a packed batch, differentiable with respect to the weights.

Everything is a function of the vectors r of the pairs: forces and stress are sums of dE/dr. A representation whose fast
path has a variant for training (engine/select.py) runs on pairs; others run unchanged, on directed edges.

Shapes as in packed_frames.py: M atoms, N of them in frames, P pairs, B frames, K elements, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ...data.labels import LEVEL
from ...engine.graph import ForbidHostSync, HostSync
from ...engine.select import fast_path
from ...kernels.interfaces import PairBatch, PairNetwork
from ...kernels.pair_ops import MultilinearOp, PairSum, SegmentSum, one_hot
from ...neighbors.neighbor_list import safe_norm
from ...neighbors.pairs import PairLists
from ...potential.derivatives import with_leaves
from ...potential.graph import Features, Graph, Head
from ...potential.levels import Level
from ...potential.potential import Potential, Result
from ...system import System
from ..config.sections import DIPOLE_NORM, FRAME_LABELS, property_of
from .packed_frames import Capacity, PackedBatch, PackedFrames, Part

__all__ = ["PackedNetwork", "uncapturable_reason"]


class PackedNetwork:
    """Energies, forces and stress of the network and of the priors that read its charges, and its other properties.

    Args:
        potential: whose weights are used and trained.
        num_elements: K.
        forces, stress: what to compute.
        use_kernels: operations are kernels: Triton's on a CUDA device, numba's on a CPU.
        labels: of `loop.further_labels`; their properties are computed. The label of the group asks for errors of
            relative energies.

    Attributes:
        energies: whether it has energies.
    """

    def __init__(
        self,
        potential: Potential,
        num_elements: int,
        forces: bool,
        stress: bool,
        use_kernels: bool,
        labels: Sequence[str] = (),
    ):
        self.potential, self.num_elements = potential, num_elements
        self.forces, self.stress, self.use_kernels = forces, stress, use_kernels
        self.labels, self.energies = list(labels), potential.head is not None
        self.priors = [prior for prior in potential.priors if prior.uses_charges]
        self.pair_cutoff = None if potential.head is None else potential.head.pair_cutoff
        compared = [label for label in labels if label not in FRAME_LABELS]
        wanted = ["dipole" if name == DIPOLE_NORM else name for name in map(property_of, compared)]
        wanted += ["charges"] if self.priors else []
        self.heads = [(name, potential.properties[name], potential.outputs[name].per_atom)
                      for name in dict.fromkeys(wanted) if name in potential.properties]  # fmt: skip

    def __call__(self, batch: PackedBatch) -> Result:
        """Return energy [B + 1], and if requested forces [N, 3] and stress [B + 1, 3, 3], to be differentiated further.

        Charges [N] and properties [N, …] or [B + 1, …] are those that are labelled.
        """
        r = batch.r.detach().requires_grad_(self.forces or self.stress)
        num = batch.forces.shape[0]
        triton = self.use_kernels and r.is_cuda
        features, graph, with_weights = self._features(batch, r)
        properties, charges = self._properties(features, graph, batch)
        system, leaves = self._with_leaves(batch)
        energies = self._energies(features, graph, batch, system)[:num]
        if self.priors:
            assert charges is not None, "a prior needs charges, and this model predicts none"
            energies = energies + self._prior_energies(batch, charges, system)
        per_frame = SegmentSum(batch.atom_ptr, batch.structure[:num], triton)
        energy = per_frame(energies[:, None])[:, 0]
        result = Result(energy, atom_energies=energies, charges=charges, properties=properties)
        if not r.requires_grad or not energies.requires_grad:
            return result
        with _fixed(with_weights):
            gradient, *others = torch.autograd.grad(energies.sum(), [r, *leaves.values()], create_graph=True)
        direct = dict(zip(leaves, others, strict=True))
        if self.forces:
            result.forces = PairSum(batch.pairs, triton)(gradient)[:num]
            if "pos" in direct:
                result.forces = result.forces - direct["pos"][:num].to(r.dtype)
        if self.stress:
            virial = (r[:, :, None] * gradient[:, None, :]).flatten(1)
            per_frame = SegmentSum(batch.pair_ptr, batch.pair_structure, triton)
            virial = per_frame(virial).unflatten(1, (3, 3))
            if "strain" in direct:
                virial = virial + direct["strain"][: len(virial)].to(r.dtype)
            stress = virial / batch.volume[:, None, None]
            result.stress = (stress + stress.transpose(1, 2)) / 2
        return result

    def _features(
        self, batch: PackedBatch, r: Tensor
    ) -> tuple[Features, Graph, Mapping[MultilinearOp, frozenset[int]]]:
        """Return features of all atoms, their graph, and operations that take weights, with the slots of these."""
        graph = Graph(
            z=batch.z,
            batch=batch.structure,
            num_systems=batch.charge.shape[0],
            charge=batch.charge,
            receiver=batch.z[:0],
            sender=batch.z[:0],
            vectors=r[:0],
            distances=r[:0, 0],
        )
        if batch.further is not None and self.heads:
            graph.system = batch.further.system(batch.z, batch.structure, batch.charge.double())
        network = self._variant(batch)
        if network is None:
            return self.potential.representation(_directed(graph, batch, r)), graph, {}
        return network(r), graph, network.with_weights

    def _variant(self, batch: PackedBatch) -> PairNetwork | None:
        """Return the representation's variant for training, if it has one."""
        representation = self.potential.representation
        path = fast_path(representation)
        alone = torch.arange(1, self.num_elements + 1, dtype=batch.atom_ptr.dtype, device=batch.r.device)
        ptr = torch.cat([batch.atom_ptr, batch.atom_ptr[-1:] + alone])
        charge = batch.charge[batch.structure]
        pairs = PairBatch(batch.pairs, batch.z, batch.element, charge, self.num_elements, batch.structure, ptr)
        return None if path is None else path.training(representation, pairs, self.use_kernels)

    def has_variant(self, batch: PackedBatch) -> bool:
        """Return whether the representation runs on pairs, by operations that copy nothing to the host."""
        return self._variant(batch) is not None

    def _with_leaves(self, batch: PackedBatch) -> tuple[System | None, dict[str, Tensor]]:
        """Return the frames with the spare atom, for pairs beyond the network's cutoff, and their variables.

        None if nothing reads such pairs.
        """
        if not self.priors and self.pair_cutoff is None:
            return None, {}
        assert batch.further is not None
        num, frames = batch.forces.shape[0], batch.energy.shape[0]
        system = batch.further.with_spare_atom(batch.z[:num], batch.structure[:num], batch.charge[:frames].double())
        return with_leaves(system, self.forces, self.stress)

    def _energies(self, features: Features, graph: Graph, batch: PackedBatch, system: System | None) -> Tensor:
        """Return energy_scale · (ε_i − ε_i⁰) of all atoms, [M] float64."""
        potential = self.potential
        if potential.head is None:
            return torch.zeros(len(batch.z), dtype=torch.float64, device=batch.z.device)
        default = self._energies_of(potential.head, features, graph, batch, system)
        energies = default * potential.energy_scale
        for number, level in enumerate(potential.levels, 1):  # all of them for all atoms: heads are small
            assert isinstance(level, Level) and batch.further is not None
            own = default if level.head is None else self._energies_of(level.head, features, graph, batch, system)
            frames = batch.further.labels[LEVEL] == number  # [B + 1]; single atoms come after them
            chosen = frames.index_select(0, batch.structure.clamp(max=len(frames) - 1).long())
            energies = torch.where(chosen, own * level.scale(potential.energy_scale), energies)
        return energies

    def _energies_of(
        self, head: Head, features: Features, graph: Graph, batch: PackedBatch, system: System | None
    ) -> Tensor:
        """Return ε_i − ε_i⁰ of all atoms by a head, [M] float64 in its unit."""
        energies = head(features, graph).double()
        if self.pair_cutoff is not None:
            of_pairs = self._energies_of_pairs(head, features, batch, system)
            energies = torch.cat([of_pairs, energies[batch.forces.shape[0] :]])
        if self.potential.subtract_isolated:
            kinds = one_hot(batch.element, self.num_elements, energies.dtype)
            energies = energies - kinds @ energies[-self.num_elements :]
        return energies

    def _energies_of_pairs(self, head: Head, features: Features, batch: PackedBatch, system: System | None) -> Tensor:
        """Return energies as `_energies_of`, of a head that reads pairs: for the atoms of the frames [N]."""
        assert batch.further is not None and system is not None
        num = batch.forces.shape[0]
        of_frames = {
            name: None if x is None else torch.cat([x[:num], x.new_zeros(1, *x.shape[1:])])
            for name, x in vars(features).items()
        }
        graph = Graph(
            z=system.z,
            batch=system.batch,
            num_systems=system.num_systems,
            charge=system.charge.to(batch.charge.dtype),
            receiver=batch.z[:0],
            sender=batch.z[:0],
            vectors=batch.r[:0],
            distances=batch.r[:0, 0],
            system=system,
            pairs=PairLists(system, batch.further.lists),
        )
        return head(Features(**of_frames), graph)[:num].double()  # type: ignore[arg-type]

    def _properties(
        self, features: Features, graph: Graph, batch: PackedBatch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return properties by name, and charges [N] or None."""
        num, frames = batch.forces.shape[0], batch.energy.shape[0]
        found = {name: head(features, graph)[: num if per_atom else frames] for name, head, per_atom in self.heads}
        if "charges" in found:
            return found, found["charges"]
        # of the model itself, as in `Potential`: the mean over the channels of the last stage
        return found, None if features.charges is None else features.charges[:num, -1].mean(-1)

    def _prior_energies(self, batch: PackedBatch, charges: Tensor, system: System | None) -> Tensor:
        """Return energies [N] of the priors that read charges."""
        assert batch.further is not None and system is not None
        lists = batch.further.lists
        charges = torch.cat([charges, charges.new_zeros(1)])
        energies = torch.zeros_like(charges)
        for prior in self.priors:
            energies = energies + prior(system, None if prior.cutoff is None else lists[prior.cutoff], charges)
        return energies[:-1]


@contextmanager
def _fixed(operations: Mapping[MultilinearOp, frozenset[int]]) -> Iterator[None]:
    """Compute no derivative for these slots within the block."""
    for op, slots in operations.items():
        op.fixed = slots
    yield
    for op in operations:
        op.fixed = frozenset()


def _directed(graph: Graph, batch: PackedBatch, r: Tensor) -> Graph:
    """Return the graph with its pairs as two directed edges each.

    Padding is beyond the cutoff and at the last atom, which has no other edges: a maximum over neighbors reads it too.
    """
    used = batch.pairs.real() > 0
    first, second = (
        torch.where(used, ends, len(batch.z) - 1).long() for ends in (batch.pairs.first, batch.pairs.second)
    )
    graph.receiver, graph.sender = torch.cat([first, second]), torch.cat([second, first])
    graph.vectors = torch.cat([r, -r])
    graph.distances = safe_norm(graph.vectors)
    return graph


# --- Whether a training step can be captured in a CUDA graph: found out by doing one under a guard ---


def uncapturable_reason(
    potential: Potential, part: Part, forces: bool, stress: bool, labels: Sequence[str]
) -> str | None:
    """Return the function that reads values on the host during a step, in words; None if there is none.

    The network runs in plain PyTorch: the package's own kernels copy nothing.

    Args:
        potential: what is trained.
        part: a frame, packed.
        forces, stress, labels: as for `PackedNetwork`.
    """
    elements = potential.elements_of_levels
    store = PackedFrames([part], elements, potential.cutoff, potential.device, potential.dtype, stress)
    need = store.size([0])
    capacity = Capacity(2, need.atoms + 4, need.pairs + 8, tuple(n + 8 for n in need.edges))
    batch = store.batch(torch.tensor([0, -1], device=potential.device), capacity)
    network = PackedNetwork(potential, len(elements), forces, stress, False, labels)
    if network.has_variant(batch) and not (network.heads or network.priors or network.pair_cutoff):
        return None
    parameters = [p for p in potential.parameters() if p.requires_grad]
    for guard in (nullcontext(), ForbidHostSync()):  # the first time, constants are made, which later steps have
        try:
            with guard:
                result = network(batch)
                found = [result.energy, result.forces, result.stress, result.charges, *result.properties.values()]
                values = [x.double().square().sum() for x in found if x is not None and x.requires_grad]
                torch.autograd.grad(values, parameters, allow_unused=True)
        except HostSync as error:
            return f"a step that no CUDA graph can hold: {error}"
    return None
