"""Physical priors; importing this package registers all of them."""

from .atomref import Atomref
from .base import Prior
from .coulomb import Coulomb
from .zbl import ZBL

__all__ = ["ZBL", "Atomref", "Coulomb", "Prior"]
