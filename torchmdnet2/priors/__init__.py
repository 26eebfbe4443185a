"""Physical priors; importing this package registers all of them."""

from .atomref import Atomref
from .base import Prior, PriorSum
from .coulomb import Coulomb
from .dispersion import D2
from .dispersion_d3 import D3
from .pair_potential import PairPotential
from .zbl import ZBL

__all__ = ["D2", "D3", "ZBL", "Atomref", "Coulomb", "PairPotential", "Prior", "PriorSum"]
