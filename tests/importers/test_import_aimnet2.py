"""AIMNet2 from TorchScript files: what is read, what is refused, and that nothing is run."""

from __future__ import annotations

import itertools
import zipfile

import numpy as np
import pytest
import torch
from ase import Atoms
from torch import nn

from torchmdnet2 import load
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.cli import main
from torchmdnet2.core.source_files import is_torchscript, read_torchscript
from torchmdnet2.errors import BadCheckpoint, BadConfig
from torchmdnet2.importers.torchmd_net import read_checkpoint
from torchmdnet2.models.aimnet2.importer import import_aimnet2
from torchmdnet2.training.config.build_potential import open_base

CHANNELS, RADIAL, VECTORS, HIDDEN = 2, 4, 3, 8


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def part(name: str, children: dict[str, nn.Module] | None = None, **attributes) -> nn.Module:
    """A module with this name of its class, tensors as parameters."""
    made = type(name, (Part,), {"__module__": __name__})()
    for key, value in attributes.items():
        tensor = isinstance(value, torch.Tensor)
        setattr(made, key, nn.Parameter(value, requires_grad=False) if tensor else value)
    for key, child in (children or {}).items():
        made.add_module(key, child)
    return made


def layers(*widths: int, last: bool) -> nn.Sequential:
    found = []
    for a, b in itertools.pairwise(widths):
        found += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*(found if last else found[:-1]))


def radial() -> dict[str, torch.Tensor]:
    numbers = {"rc": torch.tensor(4.0), "eta": torch.tensor(1.5), "shifts": torch.tensor([0.8, 1.6, 2.4, 3.2])}
    return {f"{name}_{kind}": value.clone() for name, value in numbers.items() for kind in "sv"}


def dispersion(**changes) -> nn.Module:
    """For hydrogen and helium, whose reference systems are those of the published tables in form, not in numbers."""
    c6 = torch.zeros(3, 3, 5, 5, 3)
    cn = torch.full((3, 5), -1.0)
    cn[1, :2], cn[2, 0] = torch.tensor([0.9, 0.0]), 0.0
    c6[..., 1], c6[..., 2] = cn[:, None, :, None], cn[None, :, None, :]
    c6[1:, 1:, 0, 0, 0] = 2.0
    numbers = {"c6ab": c6, "rcov": torch.ones(3), "r4r2": torch.ones(3), "cnmax": torch.tensor([0.0, 2.0, 1.0])}
    return part("D3BJ", **numbers, **{"s6": 1.0, "s8": 0.4, "a1": 0.5, "a2": 3.0, "k1": -16.0, "k3": -4.0} | changes)


def member(**changes) -> nn.Module:
    features = CHANNELS * RADIAL
    read, charges = 2 * features + CHANNELS * VECTORS, 1 + RADIAL + VECTORS
    shifts = torch.zeros(5, 1)
    shifts[1:3, 0] = torch.tensor([-13.0, -78.0])
    outputs = {
        "energy_mlp": part("Output", {"mlp": layers(HIDDEN, 4, 4, 1, last=False)}, apply_fn="none"),
        "atomic_shift": part("AtomicShift", {"shifts": part("Embedding", weight=shifts)}),
        "atomic_sum": part("AtomicSum", key_in="energy"),
        "lrcoulomb": part("LRCoulomb", rc=torch.tensor(4.6)),
        "d3bj": changes.pop("d3bj", dispersion()),
    } | changes
    children = {
        "aev": part("AEVSV", **radial()),
        "afv": part("Embedding", weight=torch.randn(5, features)),
        "conv_a": part("ConvSV", agh=torch.randn(CHANNELS, RADIAL, VECTORS)),
        "conv_q": part("ConvSV", agh=torch.randn(1, RADIAL, VECTORS)),
        "mlps": nn.ModuleList(
            [
                layers(read, 7, 6, features + 2, last=False),
                layers(read + charges, 7, 6, features + 2, last=True),
                layers(read + charges, 7, 6, 6, HIDDEN, last=True),
            ]
        ),
        "outputs": part("Outputs", outputs),
    }
    return part("Forces", {"module": part("AIMNet2", children, d2features=True)})


def write(module: nn.Module, path) -> str:
    torch.jit.script(module).save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    torch.manual_seed(1)
    models = [member(), member()]
    whole = part("EnsembledModel", {"models": nn.ModuleList(models)}, x=["coord"], detach=True)
    return write(whole, tmp_path_factory.mktemp("aimnet2") / "ensemble.jpt"), models


def test_members_have_their_own_weights(ensemble, tmp_path, capsys):
    path, models = ensemble
    for k, given in enumerate(models):
        assert main(["import", path, str(tmp_path / f"{k}.tmn"), "--member", str(k)]) == 0
        assert f"member {k} of the 2" in capsys.readouterr().out
        found, theirs = load(tmp_path / f"{k}.tmn"), given.module
        network = found.representation
        for ours, other in (
            (network.embedding.weight, theirs.afv.weight),
            (network.convolve.combine, theirs.conv_a.agh),
            (network.passes[1][2].weight, theirs.mlps[1][2].weight),
            (network.passes[2][6].bias, theirs.mlps[2][6].bias),
            (found.head.output_network.layers[4].weight, theirs.outputs.energy_mlp.mlp[4].weight),
        ):
            assert torch.equal(ours, other)
        assert found.elements == [1, 2] and found.cutoff == 4.0 and found.priors[2].s8 == 0.4


def test_all_members_are_one_potential(ensemble, tmp_path, capsys):
    """Mean and spread of energies and forces by ASE, from one file; one member is trained further, not all."""
    file = tmp_path / "all.tmn"
    assert main(["import", ensemble[0], str(file)]) == 0 and "all 2 members" in capsys.readouterr().out
    atoms = Atoms("H3He", [[0, 0, 0], [0.8, 0.1, 0], [0.2, 0.9, 0.3], [1.9, 0, 0.4]])
    calculator = TorchMDNet2Calculator(load(file), charge=1)
    single = [TorchMDNet2Calculator(import_aimnet2(ensemble[0], k), charge=1) for k in range(2)]
    for name, close in (("energy", 1e-5), ("forces", 1e-5), ("charges", 1e-6)):
        each = [one.get_property(name, atoms) for one in single]
        assert np.abs(calculator.get_property(name, atoms) - np.mean(each, 0)).max() < close
        if name != "charges":
            assert np.abs(calculator.get_property(f"{name}_std", atoms) - np.std(each, 0, ddof=1)).max() < close
    with pytest.raises(BadConfig, match="2 members, and only one can be trained"):
        open_base(str(file), "eV")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d3bj": dispersion(k3=-3.0)}, "coordination numbers of D3 are not computed as in AIMNet2"),
        ({"lrcoulomb": part("LRCoulomb", rc=torch.tensor(5.0))}, "damped up to 5.0"),
        ({"lrcoulomb": part("Coulomb", rc=torch.tensor(4.6))}, "terms of the energy must be"),
        ({"d3bj": part("D3BJ", s6=1.0)}, "has no 'k1'"),
    ],
)
def test_other_energy_terms_are_refused(changes, words, tmp_path):
    path = write(member(**changes), tmp_path / "model.jpt")
    with pytest.raises(BadCheckpoint, match=words):
        import_aimnet2(path)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("outputs.atomic_shift.shifts.weight", torch.zeros_like, "no energies of elements"),
        ("outputs.energy_mlp.apply_fn", lambda _: "tanh", "network of the energies does not have the form"),
        ("aev.eta_v", lambda eta: eta + 1, "radial functions of the vectors differ"),
        ("d2features", lambda _: False, "features have no shells"),
        ("mlps.0.1.kind", lambda _: "SiLU", "layers of a network differ from those of AIMNet2:"),
        ("outputs.d3bj.c6ab", lambda c6: torch.cat([c6[:, :2], c6[:, 2:] + 1], 1), "depend on the other element"),
        (
            "outputs.d3bj.cnmax",
            lambda limits: limits + 1,
            "limits of the coordination numbers differ from the number of reference systems",
        ),
        ("outputs.d3bj.c6ab", lambda c6: torch.where(c6 == -1, -2, c6), "table of reference systems does not have"),
        ("outputs.lrcoulomb.rc", lambda _: None, "does not have the parts of AIMNet2: "),
    ],
)
def test_other_forms_of_the_network_are_refused(ensemble, path, change, words, monkeypatch):
    from torchmdnet2.models.aimnet2 import importer as aimnet2

    file = read_torchscript(ensemble[0])
    parent, _, name = path.rpartition(".")
    part = file[f"models.0.module.{parent}"] if parent else file["models.0.module"]
    if name == "kind":
        part.kind = change(part.kind)
    else:
        part.attributes[name] = change(part[name])
    monkeypatch.setattr(aimnet2, "read_torchscript", lambda _: file)
    with pytest.raises(BadCheckpoint, match=words):
        import_aimnet2(ensemble[0], 0)
    assert import_aimnet2(ensemble[0], 1).elements == [1, 2]  # the other member has no fault


def test_members_with_other_terms_are_no_ensemble(ensemble, monkeypatch):
    from torchmdnet2.models.aimnet2 import importer as aimnet2

    file = read_torchscript(ensemble[0])
    file["models.1.module.outputs.d3bj"].attributes["s8"] = 0.5
    monkeypatch.setattr(aimnet2, "read_torchscript", lambda _: file)
    with pytest.raises(BadCheckpoint, match="members differ in more than their weights: import them one by one"):
        import_aimnet2(ensemble[0])


def test_members_that_are_not_there_are_refused(ensemble, tmp_path, capsys):
    with pytest.raises(BadCheckpoint, match=r"no member 2; its members are 0 … 1"):
        import_aimnet2(ensemble[0], 2)
    assert main(["import", ensemble[0], str(tmp_path / "a.tmn"), "--elements", "H"]) != 0
    assert "a model of AIMNet2 states this itself" in capsys.readouterr().err
    alone = write(member(), tmp_path / "alone.jpt")
    assert import_aimnet2(alone).metadata["import"]["decisions"][0] == "the model"
    with pytest.raises(BadCheckpoint, match="not an ensemble"):
        import_aimnet2(alone, 1)
    torch.save(package_file(), tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="the file holds one model and not an ensemble: leave the member out"):
        import_aimnet2(tmp_path / "a.pt", 1)
    torch.save({"state_dict": {}}, tmp_path / "b.pt")
    with pytest.raises(BadCheckpoint, match="neither a TorchScript file nor a model of the package aimnet"):
        import_aimnet2(tmp_path / "b.pt")


def rewritten(path: str, target, change) -> str:
    """The file with other instructions."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return str(target)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem"),
        lambda text: text.replace(b"collections\nOrderedDict", b"builtins\neval"),
        lambda text: text[: len(text) // 2],
        lambda text: b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        lambda text: b"",
    ],
)
def test_files_that_call_anything_else_are_refused(ensemble, tmp_path, change, monkeypatch):
    import os

    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it was run"))
    path = rewritten(ensemble[0], tmp_path / "bad.jpt", change)
    with pytest.raises(BadCheckpoint, match=r"bad\.jpt"):
        read_torchscript(path)


def test_other_files_are_no_torchscript(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.ckpt")
    (tmp_path / "b.jpt").write_bytes(b"nothing")
    assert not is_torchscript(tmp_path / "a.ckpt") and not is_torchscript(tmp_path / "b.jpt")
    for name in ("a.ckpt", "b.jpt"):
        with pytest.raises(BadCheckpoint, match="TorchScript"):
            read_torchscript(tmp_path / name)
    torch.save({"format_version": 2, "model_yaml": "class: AIMNet2", "state_dict": {}}, tmp_path / "d.pt")
    with pytest.raises(BadCheckpoint, match="a model of the package aimnet: torchmdnet2 import"):
        read_checkpoint(tmp_path / "d.pt")
    other = write(nn.Linear(2, 2), tmp_path / "c.jpt")
    with pytest.raises(BadCheckpoint, match="holds a Linear, not an AIMNet2"):
        import_aimnet2(other)


PACKAGE = f"""
class: aimnet.models.AIMNet2
kwargs:
  aev: {{rc_s: 4.0, nshifts_s: {RADIAL}}}
  nfeature: {RADIAL}
  d2features: true
  hidden: [[7, 6], [7, 6], [7, 6, 6]]
  aim_size: {HIDDEN}
  outputs:
    energy_mlp: {{class: aimnet.modules.Output, kwargs: {{key_in: aim, key_out: energy,
                  mlp: {{activation_fn: torch.nn.GELU, last_linear: true}}}}}}
    atomic_shift: {{class: aimnet.modules.AtomicShift, kwargs: {{key_in: energy, key_out: energy}}}}
    atomic_sum: {{class: aimnet.modules.AtomicSum, kwargs: {{key_in: energy, key_out: energy}}}}
    srcoulomb: {{class: aimnet.modules.SRCoulomb, kwargs: {{key_in: charges, key_out: energy, rc: 3.5}}}}
"""


def package_file(**changes) -> dict:
    """The first member of the ensemble as the package aimnet writes it: without long-range terms."""
    torch.manual_seed(1)
    state = {name.removeprefix("module."): value for name, value in member().state_dict().items()}
    kept = {k: v for k, v in state.items() if not k.startswith(("outputs.lrcoulomb", "outputs.d3bj"))}
    d3 = {"s8": 0.4, "a1": 0.5, "a2": 3.0}
    return {
        "format_version": 2, "model_yaml": PACKAGE, "cutoff": 4.0, "needs_coulomb": True, "needs_dispersion": True,
        "d3_params": d3, "coulomb_mode": "sr_embedded", "coulomb_sr_rc": 3.5, "coulomb_sr_envelope": "exp",
        "implemented_species": [1, 2], "state_dict": kept,
    } | changes  # fmt: skip


def test_a_model_of_the_package_aimnet(ensemble, tmp_path, capsys):
    """The network of the TorchScript file; Coulomb energy and D3 as the package adds them."""
    torch.save(package_file(), tmp_path / "a.pt")
    assert main(["import", str(tmp_path / "a.pt"), str(tmp_path / "a.tmn")]) == 0
    assert "ends at 15 Å" in capsys.readouterr().out
    found, expected = load(tmp_path / "a.tmn"), import_aimnet2(ensemble[0], member=0)
    theirs = expected.state_dict()
    for name, value in found.state_dict().items():
        if name.startswith(("representation.", "head.", "priors.0.")):
            pair = value, theirs[name]
            if "embedding" in name:  # of the elements that it was trained on
                pair = value[1:3], theirs[name][1:3]
            assert torch.equal(*pair), name
    _, coulomb, d3 = found.config["priors"]
    assert (coulomb["charges"], coulomb["damping"], coulomb["damping_upper"]) == ("predicted", "exp", 3.5)
    assert (d3["s8"], d3["a1"], d3["a2"], d3["cutoff"], d3["switch_width"]) == (0.4, 0.5, 3.0, 15.0, 3.0)
    torch.save(package_file(needs_dispersion=False, supports_charged_systems=False), tmp_path / "b.pt")
    neutral = import_aimnet2(tmp_path / "b.pt")
    assert neutral.total_charges == [0] and len(neutral.priors) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 3}, "format_version is 3, and 2 is known"),
        ({"has_embedded_d3ts": True}, "it learned the dispersion"),
        ({"implemented_species": []}, "implemented_species must list"),
        ({"needs_coulomb": False}, "needs_coulomb is false"),
        ({"coulomb_mode": "none"}, "contradicts the outputs"),
        ({"coulomb_sr_rc": 4.0}, "two values of the Coulomb energy's damping"),
        ({"d3_params": {"s8": 1.0}}, "must have s8, a1 and a2"),
        ({"state_dict": [1]}, "state_dict must be a dictionary of tensors"),
        ({"model_yaml": PACKAGE.replace("AIMNet2\n", "AIMNet2NSE\n")}, "the network is 'aimnet.models.AIMNet2NSE'"),
        ({"model_yaml": PACKAGE.replace("modules.SRCoulomb", "modules.Unknown")}, "has no equivalent here"),
        ({"model_yaml": PACKAGE + "  num_charge_channels: 2"}, "charges of two spins"),
        ({"model_yaml": PACKAGE.replace("torch.nn.GELU", "os.system")}, "must have activation_fn: torch.nn.GELU"),
        ({"model_yaml": 3}, "model_yaml must be a text"),
        ({"model_yaml": "class: [a"}, "model_yaml: not valid YAML"),
        (
            {"model_yaml": PACKAGE.replace("kwargs:\n", "settings:\n")},
            "must have the keys class and kwargs, and no oth",
        ),
        ({"model_yaml": "class: aimnet.models.AIMNet2\nkwargs: 3"}, "model_yaml: kwargs must be a dictionary"),
        ({"model_yaml": PACKAGE + "  spins: 2"}, "the network has the unknown setting 'spins'"),
        ({"model_yaml": PACKAGE[: PACKAGE.index("outputs")] + "outputs: 3"}, "outputs of the network must be a dict"),
        ({"model_yaml": PACKAGE.replace("modules.AtomicSum", "modules.AtomicShift")}, "must have one output AtomicS"),
        ({"model_yaml": PACKAGE.replace("key_in: charges", "key_in: energy")}, "SRCoulomb must read 'charges' and add"),
        (
            {"model_yaml": PACKAGE.replace("rc: 3.5", "rc: 3.5, envelope: gauss"), "coulomb_sr_envelope": "gauss"},
            "must be 'exp' or 'cosine', not 'gauss'",
        ),
        ({"cutoff": 3.0}, r"damping of the Coulomb energy ends at 3\.5 Å, beyond the cutoff of the network"),
    ],
)
def test_other_models_of_the_package_are_refused(changes, words, tmp_path):
    torch.save(package_file(**changes), tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=words):
        import_aimnet2(tmp_path / "a.pt")


def test_views_share_numbers_and_keep_to_them(tmp_path):
    """Tensors that are parts of others, transposed, of other types."""
    whole = torch.arange(12.0).reshape(3, 4)
    holder = part("Holder", a=whole.t(), b=torch.tensor([1, 2]), c=torch.tensor(True), d=torch.zeros(0, 3))
    found = read_torchscript(write(holder, tmp_path / "views.jpt"))
    assert torch.equal(found["a"], whole.t()) and found["b"].dtype == torch.int64 and bool(found["c"])
    assert found["d"].shape == (0, 3)
