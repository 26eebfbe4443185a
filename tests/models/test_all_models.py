"""Bars R1, R2, R4, R5, R7, R9, R12, R13, R14, both precisions: every model but TensorNet, which has its own file."""

from __future__ import annotations

import pytest
import torch
from variants import ELEMENTS, VARIANTS, variant

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.testing import POTENTIAL_CHECKS, SYSTEM_CHECKS, example_systems

POTENTIALS = {kind: variant(kind) for kind in VARIANTS}
SYSTEMS = example_systems(ELEMENTS, 4.5)
SHORT = [name for name in SYSTEMS if name not in ("left-handed cell", "cubic cell")]


def can_evaluate(kind: str, system: System) -> bool:
    """Lattice sums of charges are for molecules and full periodicity."""
    return not kind.endswith(("all_pairs", "ewald")) or bool((system.pbc.all(1) | ~system.pbc.any(1)).all())


# variants of others, in two structures; in the others before a release
FURTHER = {"tensornet2_so3_gauss", "equivariant_transformer_plain", "transformer_values", "graph_network_mean"}


@pytest.mark.parametrize(
    ("kind", "system"),
    [
        pytest.param(
            kind,
            system,
            marks=pytest.mark.long if kind in FURTHER and system not in ("molecule", "triclinic cell") else (),
        )
        for kind in VARIANTS
        for system in SHORT
    ],
)
def test_structure(kind, system):
    if not can_evaluate(kind, SYSTEMS[system]):
        with pytest.raises(ValueError, match="periodic"):
            POTENTIALS[kind](SYSTEMS[system])
        return
    for check in SYSTEM_CHECKS.values():
        check(POTENTIALS[kind], SYSTEMS[system])


@pytest.mark.parametrize("kind", VARIANTS)
def test_potential(kind):
    for check in POTENTIAL_CHECKS.values():
        check(POTENTIALS[kind])


@pytest.mark.parametrize("kind", VARIANTS)
def test_forces_are_large_enough_to_be_tested(kind):
    assert float(POTENTIALS[kind](SYSTEMS["molecule"]).forces.abs().max()) > 0.05


@pytest.mark.parametrize("kind", VARIANTS)
def test_float32_agrees_with_float64(kind):
    """R18's force bar, weights as initialised: float32 within 1e-4 eV/Å of float64."""
    exact = variant(kind, noise=0.0)
    single = variant(kind, noise=0.0).float()
    reference, result = exact(SYSTEMS["molecule"]), single(SYSTEMS["molecule"].to(dtype=torch.float32))
    assert result.forces.dtype == torch.float32
    assert float((result.forces.double() - reference.forces).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", VARIANTS)
def test_saved_and_loaded(kind, tmp_path):
    potential = POTENTIALS[kind]
    save(potential, tmp_path / "model.tmn")
    again = load(tmp_path / "model.tmn")
    assert again.dtype == torch.float64
    assert torch.equal(again(SYSTEMS["molecule"]).forces, potential(SYSTEMS["molecule"]).forces)


@pytest.mark.parametrize("kind", VARIANTS)
def test_every_parameter_learns(kind):
    """Each weight changes the energy of some structure, but for the charges that nothing reads."""
    potential = variant(kind, subtract_isolated=False)
    system = SYSTEMS["molecule"]
    result = potential(system, create_graph=True)
    loss = (result.energy**2).sum() + (0 if result.charges is None else (result.charges**2).sum())
    loss.backward()
    dead = [n for n, p in potential.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
    # kept so that checkpoints of TorchMD-Net fit: vectors are zero before the first layer and not read after the last
    idle = {"representation.attention_layers.0.vec_proj.weight", "head.output_network.1.vec2_proj.weight"}
    if kind == "equivariant_transformer_plain":
        # without vectors in the head, and without distances anywhere
        idle |= {"representation.distance_expansion.offset", "representation.distance_expansion.coeff"}
    dead = [n for n in dead if n not in idle]
    assert not dead


def test_unknown_options_are_refused():
    for name, options, words in (
        ("tensornet", {"group": "O3"}, r"group must be 'O\(3\)' or 'SO\(3\)', got 'O3'"),
        ("tensornet", {"skew_sign": 0}, "skew_sign must be 1 or -1, got 0"),
        ("tensornet", {"tensor_norm": "cube"}, "tensor_norm must be 'square' or 'root', got 'cube'"),
        ("tensornet", {"hidden_channels": 0}, "hidden_channels must be at least 1 and num_layers at least 0"),
        ("tensornet", {"norm": "batch"}, r"unknown norm 'batch'\. Known: layer, log"),
        ("tensornet", {"rbf_type": "gaus"}, r"unknown radial basis 'gaus', did you mean 'gauss'\? Known: "),
        ("tensornet", {"num_rbf": 1}, "num_radial must be at least 2, got 1"),
        ("tensornet", {"cutoff": 4.0, "cutoff_lower": 4.0}, "cutoff range must satisfy 0 ≤ lower < upper"),
        ("tensornet", {"rbf_type": "bessel", "trainable_rbf": True}, "'bessel' has nothing to train"),
        ("tensornet", {"rbf_type": "smooth_bessel", "trainable_rbf": True}, "'smooth_bessel' has nothing to train"),
        ("tensornet", {"rbf_type": "smooth_bessel", "cutoff_lower": 1.0}, "'smooth_bessel' begins at 0"),
        ("tensornet2", {"group": "O3"}, r"group must be 'O\(3\)' or 'SO\(3\)', got 'O3'"),
        ("tensornet2", {"q_dim": -1}, "num_layers and q_dim at least 0"),
        ("tensornet2", {"skew_sign": 0}, "skew_sign must be 1 or -1, got 0"),
        ("matgl_tensornet", {"messages": "both"}, "messages must be 'neighbor' or 'own', got 'both'"),
        ("equivariant_transformer", {"num_heads": 7}, "must be"),
        ("transformer", {"distance_influence": "all"}, "must be"),
        ("graph_network", {"aggregation": "mul"}, "aggregation must be .*, got 'mul'"),
    ):
        with pytest.raises(ValueError, match=words):
            Potential.from_config({"model": {"name": name, **options}})
    size = {"name": "graph_network", "hidden_channels": 8, "num_rbf": 4}
    for options, words in (
        ({"head": {"name": "scalar", "reduce": "max"}}, "reduce must be 'sum' or 'mean', got 'max'"),
        ({"head": {"name": "scalar", "num_hidden_layers": -1}}, "num_hidden_layers must be at least 0, got -1"),
        ({"properties": [{"name": "dipole", "num_hidden_layers": -1}]}, "num_hidden_layers must be at least 0, got -1"),
        (
            {
                "model": {**size, "name": "equivariant_transformer"},
                "properties": [{"name": "dipole", "equivariant": True, "num_hidden_layers": 1}],
            },
            "num_hidden_layers is for networks without vectors",
        ),
        ({"elements": [0]}, "elements must be atomic numbers 1"),
        ({"elements": [300]}, "elements must be atomic numbers 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Potential.from_config({"model": size} | options)
