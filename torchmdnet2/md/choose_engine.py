"""Choice of the engine that runs a simulation."""

from __future__ import annotations

from ..evaluator import Evaluator
from ..potential.potential import Potential
from ..system import System
from .engine import Engine, HostEngine
from .integrators import VelocityVerlet

__all__ = ["make_engine"]


def make_engine(potential: Potential, system: System, dynamics: VelocityVerlet, interval: int) -> Engine:
    """The fastest engine for a potential and a device.

    On the CPU: with a compiled integrator where the potential runs on compiled kernels. On a GPU: several steps in one
    CUDA graph where the potential runs on fused kernels; a graph of the potential's own between launches of the
    integrator where it has another (models evaluated by autograd).

    Args:
        potential: on the system's device.
        system: N atoms in B structures, float64; where the simulation begins.
        dynamics: the integrator.
        interval: steps between checks by the host.
    """
    # a graph cannot be captured within another
    evaluator = Evaluator(potential, graphs=False)
    if system.device.type != "cuda":
        step = evaluator.bind(system, stress=False)
        if not step.compiled:  # the integrator takes a negligible part of the time
            return HostEngine(step, dynamics)
        from .compiled import CompiledEngine

        return CompiledEngine(step, dynamics)
    if not evaluator.fused:
        evaluator = Evaluator(potential)
    step = evaluator.bind(system, stress=False)
    try:
        from ..engine.step import FusedBoundStep
        from .kernels_gpu import GraphEngine
    except ImportError:  # no Triton
        return HostEngine(step, dynamics)
    if not isinstance(step, FusedBoundStep):
        return HostEngine(step, dynamics)
    return GraphEngine(step, dynamics, interval, capture=evaluator.fused)
