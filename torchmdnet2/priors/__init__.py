"""Physical priors; importing this package registers all of them."""

from .atomref import Atomref
from .base import Prior

__all__ = ["Atomref", "Prior"]
