"""TorchMD-Net's training YAML turned into ours."""

from __future__ import annotations

import pytest
import yaml

from torchmdnet2.errors import BadConfig
from torchmdnet2.importers import config_from_torchmd_net, convert_yaml
from torchmdnet2.training.config import parse_config

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
          "q_weights": [1.0, [0.5, 2.0]], "coulomb_cutoff": 8.0}, {"q_dim": 2}, "scalar_coulomb"),
    ],
)  # fmt: skip
def test_every_model(theirs, model, head):
    config = parse_config(config_from_torchmd_net(theirs))
    assert {key: config.model[key] for key in model} == model
    assert config.head["name"] == head
    if head == "scalar_coulomb":
        assert config.head["q_weights"] == [1.0, 1.0, 0.5, 2.0]


def test_priors():
    priors = ["Atomref", {"ZBL": {"cutoff_distance": 4.0}}, "D2", {"Coulomb": {"upper_switch_distance": 0.4}}]
    config = parse_config(config_from_torchmd_net({"prior_model": priors}))
    assert [p["name"] for p in config.priors] == ["atomref", "zbl", "d2", "coulomb"]
    assert config.priors[1]["cutoff"] == 4.0 and config.priors[3]["damping_upper"] == 4.0


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"model": "painn"}, "painn"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"output_model": "DipoleMoment"}, "DipoleMoment"),
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


def test_text_to_text():
    """The YAML is written with the notes as comments, and reads back as a valid configuration."""
    text = convert_yaml(TENSORNET)
    assert text.startswith("# Converted") and "# data.train: give the data" in text
    assert parse_config(yaml.safe_load(text)).model["hidden_channels"] == 64
    for wrong in ("- a list", "a: [unclosed"):
        with pytest.raises(BadConfig):
            convert_yaml(wrong)
