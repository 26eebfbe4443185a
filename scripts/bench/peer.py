"""TorchMD-Net's models with the weights of one of our potentials, in its modes; used by the other benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmdnet2 import Potential, System
from torchmdnet2.neighbors import neighbor_list

__all__ = ["MODES", "peer_model", "peer_step"]

MODES = ("eager", "graph", "compile")
CAPTURED = ("tensornet", "tensornet2")  # its other models read the number of edges back in every step


def peer_model(potential: Potential, neighbors: int, derivative: bool, static: bool) -> Any:
    """TorchMD-Net's model; `neighbors` is the largest number that an atom has.

    Raises:
        ImportError: TorchMD-Net is not installed.
        ValueError: it has no model with these weights.
    """
    from torchmdnet.models.model import create_model

    from torchmdnet2.importers.torchmd_net import export_state

    arguments, state = export_state(potential)
    # without the reference energies, which would only cost it time: forces are compared
    arguments |= {
        "prior_model": None, "prior_args": None, "max_num_neighbors": neighbors, "derivative": derivative,
        "static_shapes": static, "charge": False, "check_errors": False, "box_vecs": None, "dropout": 0.0,
        "q_dim": arguments.get("q_dim", 16),
    }  # fmt: skip
    model = create_model(arguments)
    missing = model.load_state_dict({k: v for k, v in state.items() if not k.startswith("prior")}, strict=False)
    absent = sorted(set(missing.missing_keys) & {name for name, _ in model.named_parameters()})
    if absent or missing.unexpected_keys:
        raise RuntimeError(f"weights do not fit: {absent[:4]} {missing.unexpected_keys[:4]}")
    return model.to(potential.device).eval().requires_grad_(False)


def peer_step(potential: Potential, system: System, mode: str) -> Callable[[], torch.Tensor]:
    """A step that gives forces: neighbor search, energy, forces.

    eager: autograd. graph: energy and forces in one CUDA graph. compile: torch.compile(mode="reduce-overhead") after
    `setup_for_inference`. The largest number of neighbors is the true one and two more, which favours the peer: its
    users cannot know it.

    Raises:
        ImportError: TorchMD-Net is not installed.
        ValueError: it has no model with these weights, or cannot capture its model.
    """
    name = potential.config["model"]["name"]
    if mode == "graph" and name not in CAPTURED:
        raise ValueError(f"TorchMD-Net cannot capture its {name}: lists are cut to the edges found, which it waits for")
    neighbors = int(torch.diff(neighbor_list(system, potential.cutoff).row_ptr).max()) + 2
    model = peer_model(potential, neighbors, mode == "graph", mode != "eager")
    box = system.cell[0] if bool(system.pbc.any()) else None
    z, batch = system.z, system.batch

    def forces_of(call: Any, pos: torch.Tensor) -> torch.Tensor:
        energy, _ = call(z, pos, batch, box=box)
        return -torch.autograd.grad(energy.sum(), pos)[0]

    if mode == "eager":
        return lambda: forces_of(model, system.pos.clone().requires_grad_(True))
    if mode == "compile":
        model.cpu()
        model.representation_model.setup_for_inference(z.cpu(), batch.cpu())
        model.to(potential.device)
        with torch.no_grad():
            model(z, system.pos, batch, box=box)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor", dynamic=False, fullgraph=False, mode="reduce-overhead")
        return lambda: forces_of(compiled, system.pos.clone().requires_grad_(True))
    pos = system.pos.clone().requires_grad_(True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(5):
            model(z, pos, batch, box=box)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            _, forces = model(z, pos, batch, box=box)

    def replay() -> torch.Tensor:
        graph.replay()
        return forces

    return replay
