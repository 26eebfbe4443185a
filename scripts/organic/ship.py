"""Make a shipped model from a trained one: the same weights, with a card that says what it is for and what not.

    python scripts/organic/ship.py potentials/organic.tmn torchmdnet2/potentials/organic.tmn \
        --errors potentials/organic-errors.json --speed "One NVIDIA H200: ..."

Paths of the training are left out; the errors are those of `evaluate.py` on the test subset, by kind. A model that was
trained further with dft.yaml has a card that says so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torchmdnet2 import checkpoint, load

TEACHER = (
    "The labels are those of AIMNet2 ωB97M-D3 (ensemble of four, MIT licence, © Isayev Lab, "
    "aimnet2_wb97m-d3_ens.jpt): D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025). Cite it when you use "
    "this model."
)
INHERITED = " Its errors are inherited: it binds neutral dimers too weakly, water clusters too strongly."
DATA = (
    "Conformers, strained molecules, stretched bonds, shared protons, substitutions at carbon, ions alone and apart, "
    "dimers and clusters with water of molecules from the NCI AIDS antiviral screen (NIH/NCI Developmental "
    "Therapeutics Program, from DeepChem's repository), of analogues with B, Si, As, Se and I, of random molecules of "
    "heteroatoms, of small molecules and ions, and monomers and solvated amino acids of SPICE (CC0); frames of "
    "dynamics with the teacher, or in training also with an earlier model, at 300 to 1000 K (validation and test: "
    "teacher, 300 and 600 K). Subsets share no scaffold. Made by scripts/organic."
)
USE = (
    "Closed-shell molecules of H, B, C, N, O, F, Si, P, S, Cl, As, Se, Br and I with total charges −2 to +2: "
    "conformers, vibrations and dynamics at ordinary temperatures of molecules, dimers and small clusters. The energy "
    "is that of a short-range network, D3(BJ), the Coulomb energy of predicted charges and a repulsion of atoms in "
    "collision, which is 0 at the distances of molecules."
)
NOT_FOR = (
    "Radicals and other open shells, metals, other elements or charges. Bulk water, other liquids and crystals "
    "without a comparison with experiment: they run, with lattice sums. Water by organic has about 0.91 g/cm³, 9 % "
    "too low; the volumes of ten crystals change by −11 to +42 % with organic, and by −18 to +26 % with "
    "organic-small. Reactions: of transition states the training data have only those of shared protons, of "
    "substitutions at carbon and, with organic, of hydrogen shifts. Reaction energies beyond conformers and isomers."
)
FURTHER = (
    "The network that was trained on the teacher was then trained on more. The weights are a weighted mean of six "
    "further trainings, and the configuration is that of one of them. Energies of 1,855 molecules, ions, groups of "
    "them and clusters of water by density functional theory, ωB97M-D3(BJ)/def2-TZVPPD, and forces of 1,583 of them "
    "(PySCF and GPU4PySCF; scripts/organic/dft): energies of ions and of reactions are at this level, whose diffuse "
    "functions the teacher lacks. Relative energies of TorsionTest2000, ωB97X-D3(BJ)/def2-TZVPD (MIT licence, © 2025 "
    "Leif Jacobson): J. Weber and others, arXiv:2505.06462. Labels of earlier weights for 180,000 frames, and of the "
    "teacher for 600,000, among them protons on their way between two atoms of a molecule or ion. Dimers are bound too "
    "weakly by 0.4 kcal/mol on average (S66). The errors below are those of geometries as built, without dynamics, "
    "beside the teacher."
)
LEVEL = "ωB97M-D3(BJ), torsions ωB97X-D3(BJ)"
SOURCES = {
    "licence": "torsions: TorsionTest2000, MIT, © 2025 Leif Jacobson; structures: public data of NCI/DTP, SPICE (CC0), "
    "and, as the other labels, of this project (MIT)",
    "citation": "D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025); J. Weber and others, "
    "arXiv:2505.06462",
}
"""Of the data that `FURTHER` names, which has the basis sets; users write the level as `level=`."""

OF_TEACHER = {
    "licence": "structures: public data of NCI/DTP, SPICE (CC0), and, as the labels by AIMNet2 (MIT), of this project",
    "citation": "D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025)",
}
"""Of the data of models that were trained on the teacher alone."""

SETS = {
    "torsions, scans not trained on: profile": ("0.23", "0.80"),
    "torsions, scans not trained on: barrier": ("0.30", "1.24"),
    "dimers, S66": ("0.52", "1.61"),
    "water clusters, WATER27": ("1.90", "7.85"),
    "conformers, MCONF": ("0.76", "1.05"),
    "conformers, PCONF21": ("1.28", "1.46"),
    "conformers, ICONF": ("0.74", "1.80"),
    "conformers, Amino20x4": ("0.51", "0.93"),
    "conformers, UPU23": ("1.02", "3.09"),
    "isomers, ISO34": ("0.68", "1.25"),
    "barriers, BH76 (13 of closed shells)": ("5.1", "9.8"),
}
"""Errors in kcal/mol of `organic` and of `organic-small`, as in docs/models.md."""


def beside_references(further: bool) -> str:
    """The table of errors of relative and of interaction energies.

    Args:
        further: of `organic`; else of `organic-small`.
    """
    rows = [f"| {name} | {errors[0 if further else 1]} |" for name, errors in SETS.items()]
    return "\n".join([
        "Mean absolute errors beside coupled cluster and similar references (GMTKN55), torsions beside "
        "ωB97X-D3(BJ)/def2-TZVPD:", "", "| set | kcal/mol |", "|---|---|", *rows,
    ])  # fmt: skip


NOT_CALIBRATED = " It does not say where it is not sure."


def described(metadata: dict[str, Any], errors: dict[str, Any], calibrated: bool, speed: str) -> dict[str, Any]:
    """The metadata of a training without paths, with errors by kind and the sections of the card."""
    config = metadata["config"]
    sources = config["data"].get("sources") or []
    for source in sources:
        source.update({subset: _local(source.get(subset)) for subset in ("train", "validation", "test")})
    if not sources:
        config["data"].update(train="labels/train-*.h5", validation="labels/validation-*.h5", cache="auto")
    config["output"]["folder"] = f"work/{Path(config['output']['folder']).name}"
    if config.get("init"):
        config["init"]["file"] = Path(config["init"]["file"]).name
    data = {name: value for name, value in metadata["data"].items() if name != "files"}
    by_kind = {f"test {kind}": {k: v for k, v in found.items() if k != "frames"} for kind, found in errors.items()}
    not_for = NOT_FOR if calibrated else NOT_FOR + NOT_CALIBRATED
    about = {"Meant for": USE, "Not for": not_for, "Teacher": TEACHER, "Training data": DATA}
    about |= {"Training, continued": FURTHER} if sources else {"Teacher": TEACHER + INHERITED}
    about |= {"Tests beside references": beside_references(bool(sources))}
    about |= {"Speed": speed} if speed else {}
    data |= {"level_of_theory": LEVEL, **SOURCES} if sources else OF_TEACHER
    split = {"split": "by Bemis-Murcko scaffold, scripts/organic/molecules.py"}
    return {**metadata, "config": config, "data": {**data, **split}, "errors": by_kind, "about": about}


def _local(path: str | None) -> str | None:
    """A file and its folder, without what is above them."""
    return path and "/".join(Path(path).parts[-2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="best.tmn of the training")
    parser.add_argument("target", type=Path)
    parser.add_argument("--errors", type=Path, required=True, help="JSON of evaluate.py on the test subset")
    parser.add_argument("--speed", default="", help="speed by `torchmdnet2 bench` and `md`, in words")
    options = parser.parse_args()
    errors = json.loads(options.errors.read_text())
    if errors["subset"] != "test":
        raise SystemExit(f"{options.errors}: errors of the test subset are expected, not of {errors['subset']}")
    potential = load(options.model)
    calibrated = potential.calibration is not None
    potential.closed_shell = potential.config["closed_shell"] = True  # as the teacher
    metadata = described(dict(potential.metadata), errors["errors"], calibrated, options.speed)
    checkpoint.save(potential, options.target, metadata)
    print(f"{options.target}: {options.target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
