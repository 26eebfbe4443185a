"""TorchMD-Net's checkpoints: proved, converted, reproduced, refused, and written back."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torchmd_net_files import FOLDER, read_golden

from torchmdnet2 import System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadCheckpoint
from torchmdnet2.importers import convert, export_checkpoint, export_state, import_checkpoint, read_checkpoint

CHECKPOINTS = {
    "lightning_3x_tensornet": "lightning_3x_tensornet",
    "lightning_2x_tensornet": "lightning_3x_tensornet",
    "lightning_3x_equivariant_transformer": "lightning_3x_equivariant_transformer",
}
GOLDEN = [
    "tensornet_o3", "tensornet_so3", "tensornet_charge", "tensornet_gauss_1l", "tensornet2", "tensornet2_coulomb",
    "tensornet2_coulomb_cut", "et", "et_vector_cutoff", "transformer", "graph_network", "tensornet_ese",
]  # fmt: skip


def inputs(name):
    """The two molecules, neutral, and all numbers that are not weights."""
    data = read_golden(name).data
    return System(z=data["in/z"], pos=data["in/pos"], batch=data["in/batch"]), data


def golden(name):
    """Hyper-parameters, state and the two molecules, neutral."""
    return read_golden(name).args, read_golden(name).state, inputs(name)[0]


def decisions(potential) -> str:
    return "\n".join(potential.metadata["import"]["decisions"])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_give_their_outputs(name, tmp_path):
    """All three Lightning checkpoints, to 2e-7 of their float64 outputs; again after saving as .tmn."""
    potential = import_checkpoint(FOLDER / f"{name}.ckpt")
    assert potential.dtype == torch.float32
    save(potential, tmp_path / "model.tmn")
    system, data = inputs(CHECKPOINTS[name])
    for model in (potential, load(tmp_path / "model.tmn")):
        result = model.double()(system)
        y, forces = data["out/y"].flatten(), data["out/forces"]
        assert float((result.energy - y).abs().max() / y.abs().max()) <= 2e-7
        assert float((result.forces - forces).abs().max() / forces.abs().max()) <= 2e-7
    assert load(tmp_path / "model.tmn").metadata["import"]["source"] == f"{name}.ckpt"


def test_w1_so3_models_keep_their_hand():
    """W1: the antisymmetric part has the sign of the version that trained the model: 3.x −1, 2.x +1."""
    args, state, system = golden("tensornet_so3")
    three = convert(args, state)
    del state["representation_model.distance.box"]  # it proves 3.x
    two = convert(args, state, layout="2.x")
    assert "sign -1" in decisions(three) and "sign +1" in decisions(two)
    mirrored = system.replace(pos=system.pos * torch.tensor([1.0, 1.0, -1.0]))
    assert float((three(system).energy - three(mirrored).energy).abs().max()) > 1e-3
    # with the same weights in the same order, 2.x sees the mirror image of what 3.x sees
    from torchmdnet2.core.source_files import reorder_rows

    two = convert(args, reorder_rows(state, "tensornet", "2.x"), layout="2.x")
    assert torch.allclose(two(system).energy, three(mirrored).energy, rtol=1e-10)


def test_w9_check_errors_does_not_scramble():
    """W9: a 3.x checkpoint that carries check_errors along is read as 3.x: the tensors prove it."""
    args, state = read_checkpoint(FOLDER / "lightning_3x_tensornet.ckpt")
    system, _ = inputs("lightning_3x_tensornet")
    plain, carried = convert(args, state), convert({**args, "check_errors": True}, state)
    assert torch.equal(plain(system).energy, carried(system).energy)
    assert "check_errors is ignored" in decisions(carried)


def test_the_2x_layout_is_proved_not_guessed():
    args, state = read_checkpoint(FOLDER / "lightning_2x_tensornet.ckpt")
    old_names = any(".output_network.0.weight" in k for k in state)
    assert old_names and "check_errors" in args
    system, _ = inputs("lightning_3x_tensornet")
    expected = import_checkpoint(FOLDER / "lightning_3x_tensornet.ckpt")(system).energy
    # the names alone prove it; so does check_errors with new names and no box
    from torchmdnet2.importers.torchmd_net import modern_names

    no_key = {k: v for k, v in args.items() if k != "check_errors"}
    for a, s in ((no_key, state), (args, modern_names(state))):
        assert torch.equal(convert(a, s)(system).energy, expected)
    # neither: refused, unless told
    with pytest.raises(BadCheckpoint, match=r"layout=.2\.x"):
        convert(no_key, modern_names(state))
    assert torch.equal(convert(no_key, modern_names(state), layout="2.x")(system).energy, expected)
    # both: refused
    with pytest.raises(BadCheckpoint, match="by hand"):
        convert(args, {**state, "representation_model.distance.box": torch.zeros(3, 3)})


def test_a_layout_that_the_file_disproves_is_refused():
    """The energies would be wrong, without a word."""
    files = {"2.x": "lightning_2x_tensornet.ckpt", "3.x": "lightning_3x_tensornet.ckpt"}
    for layout, other in (("2.x", "3.x"), ("3.x", "2.x")):
        path = FOLDER / files[layout]
        system, data = inputs("lightning_3x_tensornet")
        assert torch.allclose(import_checkpoint(path, layout=layout).double()(system).energy, data["out/y"].flatten())
        with pytest.raises(BadCheckpoint, match=rf"layout {other} is given, and TorchMD-Net {layout} wrote .* Leave"):
            import_checkpoint(path, layout=other)
    # a file that was changed by hand needs the user's word
    args, state = read_checkpoint(FOLDER / files["2.x"])
    both = {**state, "representation_model.distance.box": torch.zeros(3, 3)}
    assert "as requested" in decisions(convert(args, both, layout="2.x"))


def test_aceff_names():
    """The names under which AceFF-2 stores TensorNet2; its layers were never reordered, its embedding was."""
    args, state, system = golden("tensornet2")
    expected = convert(args, state)(system).energy
    from torchmdnet2.core.source_files import reorder_rows

    old = reorder_rows(state, "tensornet2", "2.x")
    del old["representation_model.distance.box"]
    assert sum(not torch.equal(old[k], state[k]) for k in old) == 2
    for alias in ("tensornetv2_alt", "tensornet-nqe"):
        found = convert({**args, "model": alias, "check_errors": False}, old)
        assert torch.equal(found(system).energy, expected)
        assert alias in decisions(found)


@pytest.mark.parametrize("name", GOLDEN)
def test_export_is_the_inverse(name, tmp_path):
    """Imported and exported: the same tensors, bit for bit, and hyper-parameters that import to the same model."""
    args, state, system = golden(name)
    potential = convert(args, state)
    args_back, back = export_state(potential)
    assert set(back) == set(state)
    for key, value in state.items():
        if ".repulsion." in key or key.endswith("atomic_mass"):
            # constants; theirs were rounded to float32 on the way
            assert torch.allclose(back[key], value, rtol=1e-7), key
        else:
            assert torch.equal(back[key], value), key
    again = convert(args_back, back)
    first, second = again(system), potential(system)
    assert torch.equal(first.energy, second.energy) and torch.equal(first.forces, second.forces)
    from torchmdnet2.importers.training_yaml import ARGUMENTS, COMMON

    used = {"model", "output_model", "reduce_op", *COMMON, *ARGUMENTS[potential.config["model"]["name"]]}
    used &= args.keys()
    assert {key: args_back[key] for key in used} == {key: args[key] for key in used}
    export_checkpoint(potential, tmp_path / "back.ckpt")
    assert torch.equal(import_checkpoint(tmp_path / "back.ckpt")(system).energy, second.energy)


def test_export_of_lightning_checkpoints():
    """The 2.x checkpoint comes back as the 3.x one that holds the same weights."""
    _, three = read_checkpoint(FOLDER / "lightning_3x_tensornet.ckpt")
    for name in ("lightning_3x_tensornet", "lightning_2x_tensornet"):
        _, back = export_state(import_checkpoint(FOLDER / f"{name}.ckpt"))
        assert set(back) == set(three)
        assert all(torch.equal(back[k], three[k]) and back[k].dtype == three[k].dtype for k in three)


def test_export_of_a_model_made_here():
    """Isolated atoms that are subtracted become reference energies; the sign of SO(3) models goes into a weight."""
    from tiny import chiral, tiny_potential

    for kind in ("o3", "so3"):
        potential = tiny_potential(kind)
        args, state = export_state(potential)
        again = convert(args, state)
        system = System.from_ase(chiral())
        assert torch.allclose(again(system).energy, potential(system).energy, rtol=1e-12)
        assert torch.allclose(again(system).forces, potential(system).forces, atol=1e-10)


def test_what_has_no_equivalent_is_not_exported():
    from tiny import tiny_potential

    with pytest.raises(ValueError, match="'d2'"):
        export_state(tiny_potential(priors=[{"name": "d2"}]))
    size = {"hidden_channels": 8, "num_rbf": 4}
    for model, head, words in (
        ({"name": "graph_network", "aggregation": "mean"}, {}, "aggregation"),
        ({"name": "graph_network", "activation": "ssp"}, {}, "activation function"),
        ({"name": "graph_network"}, {"reduce": "mean"}, "head"),
        ({"name": "graph_network"}, {"num_hidden_layers": 1}, "further layers"),
        ({"name": "tensornet", "norm": "log"}, {}, "layer norms only"),
        ({"name": "tensornet", "tensor_norm": "root"}, {}, "tensor_norm"),
        ({"name": "tensornet", "linear_readout": True}, {}, "linear_readout"),
        ({"name": "equivariant_transformer"}, {}, "equivariant heads"),
        ({"name": "equivariant_transformer", "vector_cutoff": False, "cutoff_lower": 0.5},
         {"name": "equivariant_scalar"}, "cutoff_lower"),
        ({"name": "tensornet2", "q_dim": 1, "exact_charge": False, "num_layers": 0},
         {"name": "scalar_coulomb", "q_weights": [1.0], "method": "reaction_field"}, "smoothly"),
        ({"name": "tensornet2", "q_dim": 1, "exact_charge": False, "num_layers": 0},
         {"name": "scalar_coulomb", "q_weights": [1.0], "method": "pme"}, "no Ewald summation"),
        ({"name": "tensornet2", "q_dim": 1, "exact_charge": False, "num_layers": 0},
         {"name": "scalar_coulomb", "q_weights": [1.0], "method": "reaction_field", "dielectric": 2.0},
         r"dielectric constant 78\.3"),
        ({"name": "matgl_tensornet"}, {"name": "gated_scalar"}, "has no model 'matgl_tensornet'"),
        ({"name": "tensornet", "rbf_type": "bessel"}, {}, "no Bessel functions"),
        ({"name": "graph_network"}, {"name": "gated_scalar"}, "no equivalent of the head 'gated_scalar'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            export_state(tiny_potential(model={**model, **size}, head={"name": "scalar", **head}))
    zbl = {"name": "zbl", "envelope": "covalent", "screening": "refitted"}
    two = {"name": "tensornet2", "exact_charge": False, **size}
    for options, words in (
        ({"properties": [{"name": "dipole"}]}, "one output, this potential has several"),
        ({"priors": [zbl]}, "only inside TensorNet2, scaled like the energy"),
        ({"model": two, "priors": [{**zbl, "scale": 2.0}]}, "scaled like the energy"),
        ({"model": two, "priors": [{**zbl, "radii": {"H": 0.5}}]}, "not with `radii`"),
        ({"atom_filter": 1}, "atom filter cannot be evaluated"),
    ):
        with pytest.raises(ValueError, match=words):
            export_state(tiny_potential(**options))
    with pytest.raises(ValueError, match="exact_charge"):
        export_state(tiny_potential(model={"name": "tensornet2", "hidden_channels": 8, "num_rbf": 4, "q_dim": 2}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("et", "vector_cutoff is off, as trained: the energy jumps when a pair crosses the cutoff"),
        ("tensornet2_coulomb_cut", "the Coulomb force jumps a little at the cutoff, as trained: switch_width"),
        ("tensornet2", "the charges sum to the total charge up to 1e-6 of the correction, as in the training"),
        ("tensornet_o3", "the checkpoint does not state its elements: all are allowed; give the elements"),
        ("tensornet_o3", "energies are in eV and positions in Å: the checkpoint does not state units"),
    ],
)
def test_what_differs_from_models_made_here_is_said(name, words):
    args, state, _ = golden(name)
    assert words in decisions(convert(args, state))
    assert "jumps" not in decisions(convert(*golden("et_vector_cutoff")[:2]))


def test_atom_filters_are_carried():
    """A filtered model, which TorchMD-Net 3 cannot evaluate: the same tensors one level deeper."""
    args, state, system = golden("tensornet_o3")
    deeper = {k.replace("representation_model.", "representation_model.model."): v for k, v in state.items()}
    filtered = convert({**args, "atom_filter": 1}, deeper)(system)
    whole = convert(args, state)(system)
    kept = system.z > 1
    assert torch.equal(filtered.atom_energies[kept], whole.atom_energies[kept])
    assert float(filtered.atom_energies[~kept].abs().sum()) == 0 and 0 < int(kept.sum()) < len(kept)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduce_op": "mean"}, "n \\+ 1"),
        ({"model": "painn"}, "painn"),
        ({"output_model": "Custom"}, "Custom"),
        ({"frobnicate": 3}, "frobnicate"),
        ({"cutoff_upper": 6.0}, "radial functions"),
        ({"num_layers": 3}, "do not fit"),
        ({"num_rbf": 9}, "radial functions"),
        ({"prior_model": "Coulomb", "prior_args": [{}]}, "nm"),
        ({"prior_model": "Atomref", "prior_args": [{}]}, "reference energies"),
        ({"repulsion": True}, "'repulsion' contradicts the tensors of the repulsion"),
        ({"prior_model": ["ZBL", "D2"], "prior_args": [{}]}, "names 2 priors, but has arguments for 1"),
        ({"q_dim": None, "rbf_type": None}, "radial functions do not fit"),
    ],
)
def test_refused_with_the_reason(change, words):
    args, state, _ = golden("tensornet_o3")
    with pytest.raises(BadCheckpoint, match=words):
        convert({**args, **change}, state)


def test_radial_functions_tell_long_cutoffs_apart():
    """exp(−14) and exp(−12) differ by 5e-6 only."""
    args, state, _ = golden("tensornet_o3")
    key = "representation_model.distance_expansion.means"
    long = {**state, key: torch.linspace(math.exp(-14.0), 1, len(state[key]), dtype=torch.float64).float()}
    convert({**args, "cutoff_upper": 14.0}, long)
    with pytest.raises(BadCheckpoint, match="radial functions"):
        convert({**args, "cutoff_upper": 12.0}, long)


def test_vectors_below_a_lower_cutoff_are_refused():
    """Without vector_cutoff TorchMD-Net's neighbor list alone keeps them out; with it the cutoff function does."""
    for name, right in (("et", False), ("et_vector_cutoff", True)):
        args, state, _ = golden(name)
        lower = {**args, "cutoff_lower": 0.5, "cutoff_upper": args["cutoff_upper"] + 0.5}
        if right:
            convert({**lower, "trainable_rbf": True}, state)
        else:
            with pytest.raises(BadCheckpoint, match="cutoff_lower"):
                convert(lower, state)


def test_w2_aggregations_that_were_wrong_are_refused():
    args, state, _ = golden("graph_network")
    for aggregation in ("mean", "max"):
        with pytest.raises(BadCheckpoint, match="message of zero"):
            convert({**args, "aggr": aggregation}, state)


def test_tensors_that_do_not_fit_are_refused():
    args, state, _ = golden("graph_network")
    key = "representation_model.interactions.0.conv.net.0.weight"
    with pytest.raises(BadCheckpoint, match="differs from its copy"):
        convert(args, {**state, key: state[key] + 1})
    with pytest.raises(BadCheckpoint, match="missing or too many"):
        convert(args, {k: v for k, v in state.items() if "out" not in k})
    with pytest.raises(BadCheckpoint, match="'std'"):
        convert(args, {k: v for k, v in state.items() if k != "std"})
    with pytest.raises(BadCheckpoint, match="unknown"):
        convert(args, {**state, "optimizer.step": torch.zeros(1)})
    with pytest.raises(BadCheckpoint, match=r"do not fit the hyper-parameters: Error(.|\n)*size mismatch"):
        convert(args, {k: v[:1] if k.startswith("output_model") else v for k, v in state.items()})
    with pytest.raises(BadCheckpoint, match="hyper-parameter 'num_rbf' is missing"):
        convert({k: v for k, v in args.items() if k != "num_rbf"}, state)


def test_a_repulsion_with_other_constants_is_refused():
    args, state, _ = golden("tensornet2_coulomb_cut")
    for name in ("cutoff_ab", "z_pow"):
        key = f"representation_model.repulsion.{name}"
        with pytest.raises(BadCheckpoint, match="radii or exponents of the repulsion differ"):
            convert(args, {**state, key: state[key] * 1.01})


def test_a_layout_that_is_none():
    args, state, _ = golden("tensornet_o3")
    with pytest.raises(ValueError, match=r"must be '2\.x' or '3\.x', got '1\.x'"):
        convert(args, state, layout="1.x")


def test_unknown_hyper_parameters_can_be_left_out():
    args, state, system = golden("tensornet_o3")
    potential = convert({**args, "my_note": "x", "not_set": None}, state, ignore=["my_note"])
    assert torch.equal(potential(system).energy, convert(args, state)(system).energy)
    for idle in ("my_notes", "not_set", "num_layers"):
        with pytest.raises(BadCheckpoint, match=f"ignore: {idle} has no effect"):
            convert({**args, "my_note": "x", "not_set": None}, state, ignore=["my_note", idle])


def test_units_and_elements():
    args, state, system = golden("tensornet_o3")
    plain, hartree = convert(args, state), convert(args, state, energy_unit="hartree", elements=range(1, 10))
    assert torch.allclose(hartree(system).energy, plain(system).energy * 27.211386245988, rtol=1e-12)
    assert hartree.elements == list(range(1, 10))
    args, state, _ = golden("tensornet2_coulomb")
    with pytest.raises(BadCheckpoint, match="eV"):
        convert(args, state, energy_unit="kcal/mol")


def test_priors_are_carried():
    """Atomref (delta learning included) and ZBL, in the model's unit."""
    args, state, system = golden("tensornet_o3")
    table = torch.linspace(0, -38, 20, dtype=torch.float64)[:, None]
    atomref = {"prior_model.0.initial_atomref": table, "prior_model.0.atomref.weight": table}
    expected = torch.zeros(2, dtype=torch.float64).index_add(0, system.batch, table[system.z, 0])
    plain = convert(args, state)(system).energy
    for extra in (
        {"prior_model": "Atomref", "prior_args": [{"max_z": 20}]},
        {"prior_model": [{"Atomref": {}}], "prior_args": [{"max_z": 20, "enable": False}]},
        {"remove_ref_energy": True, "prior_args": [{"max_z": 20, "enable": False}]},
    ):
        potential = convert({**args, **extra}, {**state, **atomref})
        assert torch.allclose(potential(system).energy, plain + expected, rtol=1e-12)
    # a single prior of an early 2.x
    single = {k.replace(".0.", "."): v for k, v in atomref.items()}
    potential = convert({**args, "prior_model": "Atomref"}, {**state, **single})
    assert torch.allclose(potential(system).energy, plain + expected, rtol=1e-12)
    # without being named, it is not dropped in silence
    with pytest.raises(BadCheckpoint, match="do not name"):
        convert(args, {**state, **atomref})

    given = {"cutoff_distance": 4.0, "max_num_neighbors": 50, "atomic_number": list(range(20)), "distance_scale": 1e-10}
    good = {**given, "energy_scale": 1.602176634e-19}
    potential = convert({**args, "prior_model": "ZBL", "prior_args": [good]}, state)
    assert float((potential(system).energy - plain).min()) > 0
    for change in ({"energy_scale": 4.36e-18}, {"atomic_number": [0, 6, 1]}, {"distance_scale": 1e-9}):
        with pytest.raises(BadCheckpoint, match="ZBL"):
            convert({**args, "prior_model": "ZBL", "prior_args": [{**good, **change}]}, state)


# --- hostile files ---------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


@pytest.mark.parametrize("place", ["hyper_parameters", "state_dict", "callbacks"])
def test_a_hostile_checkpoint_executes_nothing(tmp_path, place):
    """R22: code in a pickle is not run, wherever it hides; there is no other way to read the file."""
    trace = tmp_path / "executed"
    content = {"hyper_parameters": {"model": "tensornet"}, "state_dict": {}, "callbacks": {}}
    content[place] = {"x": Bomb(trace)}
    torch.save(content, tmp_path / "bad.ckpt")
    with open(tmp_path / "plain.ckpt", "wb") as file:
        pickle.dump(content, file, protocol=2)
    for name in ("bad.ckpt", "plain.ckpt"):
        with pytest.raises(BadCheckpoint, match="without running code"):
            import_checkpoint(tmp_path / name)
    assert not trace.exists()
    # the trap works: the ordinary way of loading springs it
    with open(tmp_path / "plain.ckpt", "rb") as file:
        pickle.load(file)
    assert trace.exists()


@pytest.mark.parametrize("name", ["tensornet2_coulomb_cut", "et", "graph_network"])
def test_wrong_hyper_parameters_are_bad_checkpoints(name):
    """Every hyper-parameter replaced by values of other types and sizes: a BadCheckpoint, or a model that loads."""
    from torchmdnet2.importers.training_yaml import NO_EFFECT

    args, state, _ = golden(name)
    refused = 0
    for key in args.keys() - NO_EFFECT:
        for value in (None, "x", -1, 3, 10**9, 0.5, float("nan"), [], ["x"], {"a": 1}, True):
            try:
                convert({**args, key: value}, state)
            except BadCheckpoint:
                refused += 1
    assert refused > 100


def test_files_that_are_no_checkpoints(tmp_path):
    for name, content in (("empty", b""), ("text", b"not a checkpoint"), ("zip", b"PK\x03\x04" + b"\0" * 100)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadCheckpoint):
            import_checkpoint(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        import_checkpoint(tmp_path / "absent")
    for content, words in (
        ({"weights": torch.zeros(1)}, "no hyper_parameters and state_dict"),
        ([1, 2], "not a Lightning checkpoint"),
        ({"hyper_parameters": 3, "state_dict": {}}, "must be dictionaries"),
        (
            {"hyper_parameters": {}, "state_dict": {"model.epoch": 3}},
            r"'model\.epoch' in the state_dict is not a tensor",
        ),
    ):
        torch.save(content, tmp_path / "other.ckpt")
        with pytest.raises(BadCheckpoint, match=words):
            import_checkpoint(tmp_path / "other.ckpt")
    state = {"model.mean": torch.tensor(float("nan"))}
    torch.save({"hyper_parameters": {"model": "tensornet"}, "state_dict": state}, tmp_path / "nan.ckpt")
    with pytest.raises(BadCheckpoint, match="not finite"):
        import_checkpoint(tmp_path / "nan.ckpt")
