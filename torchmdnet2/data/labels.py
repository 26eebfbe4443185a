"""The table of labels: shape, unit and meaning of what frames are labelled with. A new built-in label is one entry.

Reading, writing, the keys of the configuration, the loss, errors and reports follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..system import System
from ..units import OWN_UNITS

__all__ = ["LABELS", "SHAPES", "LabelShape", "LabelSpec", "label_names"]


@dataclass(frozen=True)
class LabelShape:
    """Shape of a label: one row per atom or one per structure, and the shape of a row."""

    per_atom: bool
    row: tuple[int, ...]

    def of(self, system: System) -> tuple[int, ...]:
        """The label's shape for these structures."""
        return self.shape(system.num_atoms, system.num_systems)

    def shape(self, num_atoms: int, num_systems: int = 1) -> tuple[int, ...]:
        """The same by their numbers."""
        return (num_atoms if self.per_atom else num_systems, *self.row)


SHAPES = {
    "scalar": LabelShape(False, ()),
    "vector": LabelShape(False, (3,)),
    "tensor": LabelShape(False, (3, 3)),
    "atom_scalar": LabelShape(True, ()),
    "atom_vector": LabelShape(True, (3,)),
    "atom_tensor": LabelShape(True, (3, 3)),
}
"""shape of a property -> its LabelShape."""


@dataclass(frozen=True)
class LabelSpec(LabelShape):
    """A label.

    Attributes:
        name: in the table, the configuration and reports.
        kind: of its unit, a key of `units.OWN_UNITS`; None: a plain number.
        description: what `data.keys` is told to be the name of.
        default_key: its name in data files, where the configuration gives none; None: not read.
        default_weight: in the loss.
        from_head: predicted by an entry of `properties`; False: the energy, or a derivative of it.
    """

    name: str
    kind: str | None = None
    description: str = ""
    default_key: str | None = None
    default_weight: float = 1.0
    from_head: bool = True

    @property
    def unit(self) -> str:
        """The unit of its values in this package, as in eV/Å; "" for a plain number."""
        return "" if self.kind is None else OWN_UNITS[self.kind]

    @property
    def unit_key(self) -> str | None:
        """The entry of `units` that is for this label; None for a plain number."""
        return None if self.kind is None else "charge" if self.kind == "charge" else self.name


class LabelTable(dict[str, LabelSpec]):
    """Label name -> its LabelSpec. Further labels say their shape themselves: "scalar:gap", "atom_scalar:shift"."""

    def __missing__(self, name: str) -> LabelSpec:
        shape, _, rest = name.partition(":")
        if not rest or shape not in SHAPES:
            raise KeyError(name)
        return LabelSpec(SHAPES[shape].per_atom, SHAPES[shape].row, name)

    def __contains__(self, name: object) -> bool:
        shape, _, rest = str(name).partition(":")
        return super().__contains__(name) or (bool(rest) and shape in SHAPES)

    def add(self, spec: LabelSpec) -> None:
        """Add a label; before anything else of the package is imported, since the configuration is made from these."""
        self[spec.name] = spec

    def of_energies(self) -> tuple[str, ...]:
        """Names of the energy and its derivatives."""
        return tuple(name for name, spec in self.items() if not spec.from_head)

    def of_heads(self) -> tuple[str, ...]:
        """Names of the others."""
        return tuple(name for name, spec in self.items() if spec.from_head)


LABELS = LabelTable()
"""label name -> LabelSpec."""

for _spec in (
    LabelSpec(False, (), "energy", "energy", "total energy of a frame", "energy", 10.0, from_head=False),
    LabelSpec(True, (3,), "forces", "force", "forces on the atoms (−dE/dr)", "forces", from_head=False),
    LabelSpec(False, (3, 3), "stress", "stress", "stress of a periodic frame, tensile positive", from_head=False),
    LabelSpec(False, (3,), "dipole", "dipole", "dipole moment, a vector; needs the property 'dipole'"),
    LabelSpec(True, (), "charges", "charge", "partial charges of the atoms; needs the property 'charges'"),
):
    LABELS.add(_spec)


def label_names(*names: Iterable[str]) -> list[str]:
    """All given label names once: those of LABELS in its order, then the further ones, sorted."""
    found = set().union(*names)
    return [name for name in LABELS if name in found] + sorted(found - LABELS.keys())
