"""Physical priors, which are added to the energy of a network; importing this package registers all of them."""

from ..potential.prior import Prior, PriorSum
from .atomref import Atomref
from .coulomb.coulomb import Coulomb
from .dispersion import D2, D3
from .pair_potential import PairPotential
from .zbl import ZBL

__all__ = ["D2", "D3", "ZBL", "Atomref", "Coulomb", "PairPotential", "Prior", "PriorSum"]
