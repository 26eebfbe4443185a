"""The code in README.md and docs/ runs as it stands."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def block(page: str, name: str) -> str:
    """The code block that follows the comment <!-- name -->."""
    found = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page} has no code block named {name}"
    return found[1]


@pytest.mark.parametrize("name", ["prior", "model"])
def test_extending(name, monkeypatch):
    from torchmdnet2.registry import PRIORS, REPRESENTATIONS

    for registry in (PRIORS, REPRESENTATIONS):
        assert list(registry)  # the built-in classes are there
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    code = block("docs/extending.md", name)
    assert "check_p" in code.splitlines()[-1]
    body = code[code.index("@") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30
    exec(compile(code, f"docs/extending.md:{name}", "exec"), {"__name__": "docs"})


def test_extending_by_kernels(monkeypatch):
    """They are used, give what autograd gives, and wrong ones are noticed, as the page says."""
    pytest.importorskip("numba")
    import torch
    from ase.build import molecule

    from torchmdnet2 import Evaluator, Potential, System
    from torchmdnet2.engine import select
    from torchmdnet2.registry import PRIORS

    monkeypatch.setattr(PRIORS, "_classes", dict(PRIORS._classes))
    monkeypatch.setattr(select, "_PRIOR_PATHS", dict(select._PRIOR_PATHS))
    names, code = {"__name__": "docs"}, block("docs/extending.md", "kernels")
    exec(compile(block("docs/extending.md", "prior"), "docs/extending.md:prior", "exec"), names)
    model = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5}
    potential = Potential.from_config({"model": model, "priors": [{"name": "morse"}], "elements": [1, 6, 8]}).eval()
    assert "priors by autograd: Morse" in Evaluator(potential).report()
    crystal = molecule("CH3CH2OH", cell=[6.0, 6.5, 7.0], pbc=True)
    crystal.rattle(0.05)
    system = System.from_ase(crystal)
    expected = potential(system, stress=True)
    exec(compile(code, "docs/extending.md:kernels", "exec"), names)
    evaluator = Evaluator(potential)
    found = evaluator(system, stress=True)
    assert "priors on kernels: Morse" in evaluator.report()
    for name in ("energy", "atom_energies", "forces", "stress"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)
    sign = "forces[i, a] += slope"
    assert sign in code
    names["__name__"] = "wrong"  # numba knows kernels by the name of their module
    exec(compile(code.replace(sign, "forces[i, a] -= slope"), "docs/extending.md:kernels", "exec"), names)
    with pytest.raises(RuntimeError, match=r"does not agree .*: force, eV/Å, differs"):
        Evaluator(potential)(system)


def test_extending_by_a_data_format(monkeypatch, tmp_path):
    from torchmdnet2.data import FORMATS, open_dataset

    monkeypatch.setattr(FORMATS, "_classes", dict(FORMATS._classes))
    exec(compile(block("docs/extending.md", "format"), "docs/extending.md:format", "exec"), {"__name__": "docs"})
    (tmp_path / "a.xyze").write_text("0 0 0 -13.6\n0 0 1 -13.5\n")
    assert [sample.labels["energy"].item() for sample in open_dataset(tmp_path / "a.xyze")] == [-13.6, -13.5]


def test_readme_python(tmp_path, monkeypatch):
    from ase.build import molecule

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "data").mkdir(parents=True)
    molecule("CH3CH2OH").write(tmp_path / "examples" / "data" / "ethanol_gfn2.xyz")
    code = block("README.md", "python")
    assert len(code.splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {"__name__": "docs"})


def test_messages_in_the_faq_are_messages():
    """A user searches the page for what the program has said."""
    from ase import Atoms
    from ase.build import molecule
    from commands import MODEL

    from torchmdnet2 import Potential, System
    from torchmdnet2.errors import needs_extra
    from torchmdnet2.md.guard import Limits, check_overlaps

    known = {"model": {**MODEL, "name": "tensornet2", "q_dim": 2}, "elements": [1, 5, 6, 8]}
    tiny = Potential.from_config({**known, "total_charges": [-1, 0, 1], "closed_shell": True})
    extra = needs_extra("smiles")

    def import_what_is_missing():
        with extra:
            raise ModuleNotFoundError("no", name="rdkit")

    faults = [
        lambda: tiny(System.from_ase(Atoms("Fe"))),
        lambda: tiny(System.from_ase(Atoms("O", info={"charge": 5}))),
        lambda: tiny(System.from_ase(molecule("OH"))),
        import_what_is_missing,
        lambda: check_overlaps(System.from_ase(Atoms("OH", [[0, 0, 0], [0, 0, 0.1]]))),
    ]
    said = [Limits().violation(300.0, 300.0, 0.0)]
    for fault in faults:
        with pytest.raises((ValueError, RuntimeError, ImportError)) as caught:
            fault()
        said.append(str(caught.value))
    headings = re.findall(r"^###.*", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [text for heading in headings for text in re.findall(r'"(.+?)"', heading)]
    assert len(quoted) == len(said)
    for text in quoted:
        pieces = [piece.rstrip(",. ") for piece in re.split("…|, …", text)]
        assert any(all(piece in message for piece in pieces) for message in said), (text, said)


def run_blocks(page: str, names: dict) -> dict:
    """Run all Python blocks of a page one after another, on the CPU; gives what they leave behind."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    for code in blocks:
        exec(compile(code.replace('"cuda"', '"cpu"'), page, "exec"), names)
    return names


def test_ase_page(tmp_path, monkeypatch):
    from ase.build import molecule
    from ase.optimize import LBFGS
    from tiny import silicon, tiny_potential

    from torchmdnet2.checkpoint import save

    monkeypatch.chdir(tmp_path)
    for name in ("aspirin", "seed0", "seed1", "seed2"):
        save(tiny_potential(seed=len(name), total_charges=[0]), tmp_path / f"{name}.tmn")
    save(tiny_potential(total_charges=[0, 1]), tmp_path / "aspirin_and_cation.tmn")
    atoms = molecule("CH3CH2OH")
    atoms.write("aspirin.xyz")
    silicon().write("crystal.cif")
    run = LBFGS.run
    monkeypatch.setattr(LBFGS, "run", lambda self, fmax: run(self, fmax, steps=2))
    names = run_blocks("docs/ase.md", {})
    assert names["ionisation"] != 0
    assert names["atoms"].calc.get_property("forces_std", names["atoms"]).shape == (9, 3)


def test_derivatives_page(tmp_path, monkeypatch):
    from tiny import tiny_potential

    from torchmdnet2.checkpoint import save

    monkeypatch.chdir(tmp_path)
    references = [{"name": "atomref", "energies": {29: -100.0}, "max_z": 30}]
    model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.5, "max_z": 30}
    save(tiny_potential(elements=[29], priors=references, model=model), tmp_path / "copper.tmn")
    names = run_blocks("docs/derivatives.md", {})
    assert names["hessian"].shape == (3, 3, 3, 3) and float(names["hessian"].detach().abs().max()) > 1
    assert names["constants"].shape == (3, 3, 3, 3) and float(names["constants"].detach().abs().max()) > 0


def test_evaluator_page():
    names = run_blocks("docs/evaluator.md", {})
    assert names["step"].check() and names["result"].forces.shape == (9, 3)
    assert float((names["step"].pos - names["system"].pos).abs().max()) > 0


def test_openmm_page(tmp_path, monkeypatch):
    openmm = pytest.importorskip("openmm")
    openmmml = pytest.importorskip("openmmml")
    import numpy as np
    from ase.build import molecule
    from openmm import app
    from tiny import tiny_potential

    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory
    from torchmdnet2.checkpoint import save

    monkeypatch.chdir(tmp_path)
    if "torchmdnet2" not in openmmml.MLPotential._implFactories:  # where this package is not installed
        openmmml.MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    for name in ("aspirin", "ligand"):
        save(tiny_potential(total_charges=[0, 1]), tmp_path / f"{name}.tmn")
    topology, system, mm_system = app.Topology(), openmm.System(), openmm.System()
    nonbonded = openmm.NonbondedForce()
    mm_system.addForce(nonbonded)
    residue = topology.addResidue("MOL", topology.addChain())
    for symbol in "OHHOHH":
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
        nonbonded.addParticle(0.1 if symbol == "H" else -0.2, 0.3, 0.1)
        system.addParticle(1.0), mm_system.addParticle(1.0)
    ligand = {"topology": topology, "mm_system": mm_system, "ligand_atoms": [0, 1, 2]}
    water = molecule("H2O").positions
    positions = np.concatenate([water, water + np.array([3, 0, 0])]) / 10
    monkeypatch.setattr("torchmdnet2.adapters.openmm.share_context", lambda: None)  # there may be no GPU
    names = run_blocks("docs/openmm.md", {"system": system, "positions": positions, **ligand})
    assert system.getNumForces() == 1
    context = openmm.Context(names["system"], openmm.VerletIntegrator(1e-3), openmm.Platform.getPlatform("Reference"))
    context.setPositions(positions)
    context.setParameter("lambda_interpolate", 0.3)
    ends = names["derivative"](context)
    energies = []
    for value in (0.2, 0.4):
        context.setParameter("lambda_interpolate", value)
        state = context.getState(energy=True, parameterDerivatives=True)
        energies.append(state.getPotentialEnergy()._value)
        assert not any(dict(state.getEnergyParameterDerivatives()).values())  # which the page warns of
    assert ends == pytest.approx((energies[1] - energies[0]) / 0.2, rel=1e-6) and abs(ends) > 1


def anchors(text: str) -> set[str]:
    """The anchors that Markdown viewers give the headings of a page, each heading once."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(path: Path) -> list[str]:
    """Relative links of a page to a file or heading that is not there."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "code", text)):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if "://" in target or (file.exists() and not anchor):
            continue
        if not file.is_file() or anchor not in anchors(file.read_text(encoding="utf-8")):
            dead.append(target)
    return dead


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]


@pytest.mark.parametrize("page", sorted(str(page.relative_to(ROOT)) for page in PAGES))
def test_links_lead_somewhere(page):
    assert not dead_links(ROOT / page)


def unknown_scripts(text: str) -> list[str]:
    """Python files that a page names and the repository has not; folders may be left out from the left."""
    folders = ("torchmdnet2", "tests", "examples", "scripts")
    known = [f"/{file.relative_to(ROOT).as_posix()}" for folder in folders for file in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"\w[\w/-]*\.py\b", text))
    return sorted(name for name in named if not any(file.endswith(f"/{name}") for file in known))


@pytest.mark.parametrize("page", sorted(str(p.relative_to(ROOT)) for p in PAGES if p.name != "CHANGELOG.md"))
def test_files_that_pages_name_exist(page):
    assert not unknown_scripts((ROOT / page).read_text(encoding="utf-8"))
    assert unknown_scripts("see scripts/no_such.py and test_docs.py") == ["scripts/no_such.py"]


def test_files_that_comments_of_the_package_name_exist():
    named = {path: unknown_scripts(path.read_text(encoding="utf-8")) for path in ROOT.glob("torchmdnet2/**/*.py")}
    assert not {str(path.relative_to(ROOT)): names for path, names in named.items() if names}


def test_parts_of_a_training_that_the_page_names_exist():
    below = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("Below `torchmdnet2.training`: ")[2]
    names = re.findall(r"`((?:config|reporting|run|steps)\.[\w.]+)\.(\w+)`", below)
    assert len(names) > 3
    for module, name in names:
        assert hasattr(import_module(f"torchmdnet2.training.{module}"), name), f"{module}.{name}"


def test_the_page_of_the_evaluator_names_all_priors_with_kernels():
    from torchmdnet2.engine import select

    listed = (ROOT / "docs/evaluator.md").read_text(encoding="utf-8").partition("; the priors ")[2].partition(";")[0]
    ours = [prior for prior in select._PRIOR_PATHS if prior.__module__.startswith("torchmdnet2.")]
    assert len(ours) > 4 and not [prior for prior in ours if f"`{prior.registered_name}`" not in listed]


def test_functions_and_classes_that_comments_of_the_package_place_in_a_module_are_there():
    """`module.name` in a docstring or comment, of a name that the package defines, and defines elsewhere."""
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("torchmdnet2/**/*.py")}
    places: dict[str, set[str]] = {}
    for path, text in texts.items():
        module = path.parent.name if path.stem == "__init__" else path.stem
        for name in re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE):
            places.setdefault(name, {"torchmdnet2", "ase", "torch"}).add(module)

    def misplaced(text):
        return [f"{m}.{name}" for m, name in re.findall(r"`([a-z]\w*)\.(\w+)`", text) if m not in places.get(name, {m})]

    assert misplaced("`guard.Bonds` `bonds.Bonds` `bonds.not_ours`") == ["bonds.Bonds"]
    assert not {str(path.relative_to(ROOT)): misplaced(text) for path, text in texts.items() if misplaced(text)}


def unknown_tests(text: str) -> list[str]:
    """Tests that a text names as `data/test_cache::expand`, and that there are not."""
    known = {
        f"{path.relative_to(ROOT / 'tests').with_suffix('').as_posix()}::{name}"
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    return sorted(set(re.findall(r"`([\w/]*test_\w+::\w+)`", text)) - known)


def test_tests_that_the_list_of_promises_names_exist():
    text = (ROOT / "docs/dev/promises.md").read_text(encoding="utf-8")
    assert text.count("::") > 500 and not unknown_tests(text)
    assert not unknown_tests((ROOT / "docs/dev/engine.md").read_text(encoding="utf-8"))
    assert unknown_tests("`test_docs::dead_links_are_found` `test_docs::no_such`") == ["test_docs::no_such"]


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: `code`, it\n[a](#a-title-code-it) [b](#b) [c](page.md#c) [d](d.md) [e](page.md) [f](https://f.g#h)\n"
    )
    assert dead_links(page) == ["#b", "page.md#c", "d.md"]


def test_index_names_every_page():
    index = ROOT / "docs" / "README.md"
    names = {page.relative_to(index.parent).as_posix() for page in index.parent.rglob("*.md")} - {"README.md"}
    assert not {name for name in names if f"({name}" not in index.read_text(encoding="utf-8")}


def wrong_options(text: str) -> list[str]:
    """Commands of a page with options that `torchmdnet2` does not have."""
    import argparse

    from torchmdnet2.cli import _parser

    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(torchmdnet2 [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    wrong = []
    for line in (*lines, *inline):
        found = re.search(r"\btorchmdnet2 ([a-z]+)((?:\s[^#|>&;]*)?)", line)
        if not found or found[1] not in commands.choices:
            continue
        known = commands.choices[found[1]]._option_string_actions
        wrong += [f"{found[1]} {o}" for o in re.findall(r"(?<!\S)(--[a-z][\w-]*)", found[2]) if o not in known]
    return wrong


@pytest.mark.parametrize("page", sorted(str(page.relative_to(ROOT)) for page in PAGES if page.name != "CHANGELOG.md"))
def test_commands_have_options_that_exist(page):
    assert not wrong_options((ROOT / page).read_text(encoding="utf-8"))
    assert wrong_options("```sh\ntorchmdnet2 md a.tmn --tim 2 \\\n --no-such x\n```\n`torchmdnet2 info --x`") == [
        "md --tim", "md --no-such", "info --x",
    ]  # fmt: skip
