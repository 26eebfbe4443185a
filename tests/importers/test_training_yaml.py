"""TorchMD-Net's training YAML turned into ours."""

from __future__ import annotations

import pytest
import yaml

from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig
from torchmdnet2.importers import config_from_torchmd_net, convert_yaml
from torchmdnet2.training.config.config import parse_config

TENSORNET = """
activation: silu
atom_filter: -1
batch_size: 16
cutoff_lower: 0.0
cutoff_upper: 4.5
dataset: SPICE
dataset_arg: {version: 1.1.4}
dataset_root: ~/data
derivative: true
early_stopping_patience: 30
ema_alpha_neg_dy: 1.0
ema_alpha_y: 0.05
embedding_dimension: 64
equivariance_invariance_group: O(3)
gradient_clipping: 40
inference_batch_size: 64
log_dir: runs/spice
lr: 1e-4
lr_factor: 0.5
lr_min: 1e-7
lr_patience: 5
lr_warmup_steps: 500
max_num_neighbors: 64
max_z: 100
model: tensornet
neg_dy_weight: 10.0
num_epochs: 1000
num_layers: 1
num_rbf: 32
num-workers: 4
output_model: Scalar
precision: 32
prior_model: Atomref
rbf_type: expnorm
remove_ref_energy: true
reduce_op: add
seed: 1
static_shapes: true
test_size: 0.1
train_loss: mse_loss
train_size: 0.8
trainable_rbf: false
val_size: 0.1
weight_decay: 0.0
y_weight: 1.0
"""


def test_a_training_of_tensornet():
    notes: list[str] = []
    config = parse_config(config_from_torchmd_net(yaml.safe_load(TENSORNET), notes))
    assert config.model["name"] == "tensornet" and config.model["hidden_channels"] == 64
    assert config.model["cutoff"] == 4.5 and config.model["num_layers"] == 1
    assert config.priors == [{"name": "atomref", "energies": "fit", "max_z": 128, "trainable": False}]
    training = config.training
    assert (training.lr, training.lr_min, training.warmup_steps, training.batch_size) == (1e-4, 1e-7, 500, 16)
    assert (training.loss.energy, training.loss.forces, training.loss.per_atom) == (1.0, 10.0, False)
    assert training.lr_schedule == "plateau" and training.max_epochs == 1000
    assert config.data.split.train == 0.8 and config.data.split.validation == 0.1
    assert config.output.folder == "runs/spice"
    assert any("data.train" in note for note in notes) and any("ema_decay" in note for note in notes)


@pytest.mark.parametrize(
    ("theirs", "model", "head"),
    [
        ({"model": "equivariant-transformer", "num_heads": 4, "vector_cutoff": False, "aggr": "add"},
         {"name": "equivariant_transformer", "num_heads": 4, "vector_cutoff": True}, "equivariant_scalar"),
        ({"model": "transformer", "distance_influence": "keys"}, {"distance_influence": "keys"}, "scalar"),
        ({}, {"name": "graph_network"}, "scalar"),
        ({"model": "tensornet2", "q_dim": 2, "num_layers": 1, "output_model": "ScalarPlusWeightedCoulomb",
          "q_weights": [1.0, [0.5, 2.0]], "coulomb_cutoff": 8.0, "repulsion": True, "coulomb_max_num_neighbors": 99},
         {"q_dim": 2}, "scalar_coulomb"),
    ],
)  # fmt: skip
def test_every_model(theirs, model, head):
    config = parse_config(config_from_torchmd_net(theirs))
    assert {key: config.model[key] for key in model} == model
    assert config.head["name"] == head
    if head == "scalar_coulomb":
        assert config.head["q_weights"] == [1.0, 1.0, 0.5, 2.0]
        assert config.head["coulomb_cutoff"] == 8.0 and config.head["dielectric"] == 78.3
        assert config.priors[0]["envelope"] == "covalent" and config.training.energy_scale == 1.0


def test_priors():
    priors = ["Atomref", {"ZBL": {"cutoff_distance": 4.0}}, "D2", {"Coulomb": {"upper_switch_distance": 0.4}}]
    plain = config_from_torchmd_net({"prior_model": priors})
    with pytest.raises(BadConfig, match="charges is empty"):
        parse_config(plain)  # they are left to the user
    plain["priors"][3]["charges"] = {"O": -0.8, "H": 0.4}
    config = parse_config(plain)
    assert [p["name"] for p in config.priors] == ["atomref", "zbl", "d2", "coulomb"]
    assert config.priors[1]["cutoff"] == 4.0 and config.priors[3]["damping_upper"] == 4.0


def test_arguments_of_priors():
    """As their hparams.yaml has them, beside the names: one table, or one for each."""
    for theirs in (
        {"prior_model": "ZBL", "prior_args": {"cutoff_distance": 3.0}},
        {"prior_model": ["ZBL"], "prior_args": [{"cutoff_distance": 3.0, "distance_scale": 1e-10}]},
        {"prior_model": [{"ZBL": {"cutoff_distance": 3.0}}], "prior_args": [{"cutoff_distance": 9.0}]},
    ):
        assert config_from_torchmd_net(theirs)["priors"] == [{"name": "zbl", "cutoff": 3.0}]
    both = {"prior_model": ["D2", "Atomref"], "prior_args": [{"cutoff_distance": 8}, {"trainable": True}]}
    d2, atomref = config_from_torchmd_net(both)["priors"]
    assert d2["cutoff"] == 8.0 and atomref["trainable"]
    delta = {"remove_ref_energy": True, "prior_args": [{"max_z": 100, "enable": False}]}
    assert [p["name"] for p in config_from_torchmd_net(delta)["priors"]] == ["atomref"]


@pytest.mark.parametrize(
    "change",
    [
        {"load_model": "a.ckpt"}, {"load_weights": "a.ckpt"}, {"lr_metric": "train"},
        {"early_stopping_monitor": "train_total_mse_loss"}, {"checkpoint_monitor": "train_total_mse_loss"},
    ],
)  # fmt: skip
def test_what_is_different_is_told(change):
    before: list[str] = []
    after: list[str] = []
    config_from_torchmd_net({"lr_metric": "val"}, before)
    config_from_torchmd_net(change, after)
    assert next(note for note in after if note not in before).startswith(next(iter(change)))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"model": "painn"}, "'painn' is not a model of TorchMD-Net; known: tensornet"),
        ({"model": {"name": "tensornet"}}, "must be the name of a model.*a configuration of torchmdnet2"),
        ({"train_loss_arg": {"reduction": "sum"}}, "reduction"),
        ({"prior_model": ["ZBL", "D2"], "prior_args": [{}]}, "prior_args"),
        ({"prior_model": [{"ZBL": {"distance_scale": 1e-9}}]}, "Å"),
        ({"frobnicate": 1}, "frobnicate: not a known key of TorchMD-Net 3"),
        ({"output_model": "VectorOutput"}, "VectorOutput"),
        ({"reduce_op": "max"}, "reduce_op"),
        ({"train_loss": "cosine"}, "train_loss"),
        ({"prior_model": "Magic"}, "Magic"),
        ({"precision": 16}, "precision"),
    ],
)
def test_what_has_no_counterpart_is_refused(theirs, words):
    with pytest.raises(BadConfig, match=words):
        config_from_torchmd_net(theirs)


def test_w2_mean_is_converted_to_a_right_mean():
    assert config_from_torchmd_net({"reduce_op": "mean"})["head"]["reduce"] == "mean"


# the YAML files that TorchMD-Net 3.1 publishes, in outline: model, layers, channels, radial functions, cutoff, batch,
# lr, lr_min, lr_factor, lr_patience, warm-up, weights of energies and forces, and what else they set
TN, ET = "tensornet", "equivariant-transformer"
PUBLISHED = {
    "TensorNet-QM9": (TN, 3, 256, 32, 5.0, 16, "1e-4", "1e-7", 0.8, 15, 1000, 1, 0, {
        "derivative": False, "dataset": "QM9", "dataset_arg": {"label": "energy_U0"}, "prior_model": "Atomref",
        "gradient_clipping": 40, "train_size": 110000, "val_size": 10000, "test_size": None, "check_errors": True,
        "remove_ref_energy": False}),
    "TensorNet-rMD17": (TN, 2, 128, 32, 4.5, 8, "1e-3", "1e-8", 0.8, 25, 500, 0.5, 0.5, {
        "ema_alpha_y": 0.01, "gradient_clipping": 40, "standardize": True, "train_size": 950, "val_size": 50,
        "test_size": None, "dataset": "MD17", "dataset_arg": {"molecules": "revised_aspirin"}}),
    "TensorNet-SPICE": (TN, 2, 128, 64, 10.0, 16, "1e-4", "1e-8", 0.5, 5, 500, 1, 10, {
        "gradient_clipping": 100, "dataset": "SPICE", "dataset_arg": {"max_gradient": 50.94, "version": "1.1.4"}}),
    "TensorNet-MACEOFF": (TN, 2, 128, 64, 10.0, 16, "1e-4", "1e-8", 0.5, 5, 500, 1, 10, {"dataset": "MACEOFF"}),
    "TensorNet-ANI1X": (TN, 2, 128, 32, 4.5, 64, "1e-4", "1e-7", 0.5, 4, 1000, 1, 100, {
        "gradient_clipping": 100, "dataset": "ANI1X"}),
    "TensorNet-ANI2X": (TN, 2, 128, 32, 5.0, 64, "1e-3", "1e-7", 0.5, 4, 1000, 1, 100, {
        "dataset": "ANI2X", "remove_ref_energy": True}),
    "ET-QM9": (ET, 8, 256, 64, 5.0, 128, "4e-4", "1e-7", 0.8, 15, 10000, 1, 1, {
        "derivative": False, "prior_model": "Atomref", "vector_cutoff": True, "dataset": "QM9", "num_heads": 8,
        "dataset_arg": {"label": "energy_U0"}, "train_size": 110000, "val_size": 10000, "test_size": None}),
    "ET-MD17": (ET, 6, 128, 32, 5.0, 8, "1e-3", "1e-7", 0.8, 30, 1000, 0.2, 0.8, {
        "ema_alpha_y": 0.05, "standardize": True, "dataset": "MD17", "num_heads": 8, "neighbor_embedding": True}),
    "ET-ANI1": (ET, 6, 128, 32, 5.0, 2048, "7e-4", "1e-7", 0.5, 5, 10000, 1, 1, {
        "derivative": False, "dataset": "ANI1", "ngpus": -1}),
    "ET-SPICE": (ET, 5, 128, 64, 10.0, 16, "1e-4", "1e-7", 0.5, 5, 1000, 0.5, 0.5, {"dataset": "SPICE"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(name, tmp_path, capsys):
    """Each converts on the command line into a configuration that is valid and says the same."""
    *values, more = PUBLISHED[name]
    model, layers, channels, radial, cutoff, batch, lr, lr_min, factor, patience, warmup, y, forces = values
    theirs = {
        **yaml.safe_load(TENSORNET), "prior_model": None, "remove_ref_energy": False, "ema_alpha_y": 1.0,
        "gradient_clipping": 0, "model": model, "num_layers": layers, "embedding_dimension": channels,
        "num_rbf": radial, "cutoff_upper": cutoff, "batch_size": batch, "lr": lr, "lr_min": lr_min,
        "lr_factor": factor, "lr_patience": patience, "lr_warmup_steps": warmup, "y_weight": y,
        "neg_dy_weight": forces, **more,
    }  # fmt: skip
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    assert main(["config", "--from-torchmd-net", str(tmp_path / "theirs.yaml")]) == 0
    config = parse_config(yaml.safe_load(capsys.readouterr().out))
    ours, training = config.model, config.training
    sizes = [ours[key] for key in ("num_layers", "hidden_channels", "num_rbf", "cutoff")]
    assert sizes == [layers, channels, radial, cutoff]
    assert ours["name"] == {TN: "tensornet", ET: "equivariant_transformer"}[model]
    assert ours.get("vector_cutoff", True)
    assert (training.batch_size, training.lr, training.lr_min) == (batch, float(lr), float(lr_min))
    assert (training.lr_factor, training.lr_patience, training.warmup_steps) == (factor, patience, warmup)
    derivative = more.get("derivative", True)
    assert (training.loss.energy, training.loss.forces) == (y, forces if derivative else 0)
    assert (config.data.keys.forces is None) != derivative
    references = more.get("prior_model") or more.get("standardize") or more.get("remove_ref_energy")
    assert [p["name"] for p in config.priors] == (["atomref"] if references else [])
    assert training.gradient_clipping == (more.get("gradient_clipping") or None)


@pytest.mark.parametrize(
    ("output", "model", "head", "label"),
    [
        ("DipoleMoment", "tensornet", {"name": "dipole", "equivariant": False}, "dipole_norm"),
        ("DipoleMoment", ET, {"name": "dipole", "equivariant": True}, "dipole_norm"),
        ("ElectronicSpatialExtent", "tensornet", {"name": "spatial_extent"}, "spatial_extent"),
    ],
)
def test_properties(output, model, head, label):
    """A model of a property is trained on that property alone."""
    theirs = {"model": model, "output_model": output, "y_weight": 2.0, "num_heads": 8, "prior_model": "Atomref"}
    config = parse_config(config_from_torchmd_net(theirs))
    assert config.head is None and config.priors == [] and config.data.keys.energy is None
    assert config.data.keys.properties == {label: label}
    assert config.training.loss.properties == {label: 2.0}
    assert {key: config.properties[0][key] for key in head} == head


def test_aggregations_that_were_wrong():
    """W2: 'mean' is the right one here, 'max' becomes its smooth form; both are told."""
    for theirs, ours in (("mean", "mean"), ("max", "softmax"), ("add", "add")):
        notes: list[str] = []
        model = config_from_torchmd_net({"model": "graph-network", "aggr": theirs}, notes)["model"]
        assert model["aggregation"] == ours
        assert any("aggr" in note for note in notes) == (theirs != "add")


def test_activation_of_the_head():
    """Theirs is one for model and head."""
    for output in ("Scalar", "DipoleMoment"):
        config = parse_config(config_from_torchmd_net({"activation": "ssp", "output_model": output}))
        assert (config.head or config.properties[0])["activation"] == "ssp"


def test_what_is_not_said_is_theirs():
    """Their defaults, where their file leaves a key out."""
    config = parse_config(config_from_torchmd_net({"derivative": True}))
    ours = {"hidden_channels": 256, "num_layers": 6, "num_rbf": 64, "cutoff": 5.0, "neighbor_embedding": False}
    assert config.model["name"] == "graph_network" and {key: config.model[key] for key in ours} == ours
    training = config.training
    assert (training.batch_size, training.lr, training.warmup_steps, training.seed) == (32, 1e-4, 0, 1)
    assert training.gradient_clipping is None and training.early_stopping_patience == 30
    assert (config.data.split.validation, config.data.split.test) == (0.05, 0.1)
    assert (training.loss.energy, training.loss.forces) == (1, 1)


def test_where_results_go():
    theirs = {"log_dir": "x", "tensorboard_use": True, "wandb_use": True, "wandb_project": "p", "num_workers": 3}
    config = parse_config(config_from_torchmd_net(theirs))
    assert config.output.folder == "x" and config.output.tensorboard and config.output.wandb.project == "p"
    assert config.data.num_workers == 3


def test_text_to_text():
    """The YAML is written with the notes as comments, and reads back as a valid configuration."""
    text = convert_yaml(TENSORNET)
    assert text.startswith("# Converted") and "# data.train: give the data" in text
    assert parse_config(yaml.safe_load(text)).model["hidden_channels"] == 64
    for wrong in ("- a list", "a: [unclosed"):
        with pytest.raises(BadConfig):
            convert_yaml(wrong)
