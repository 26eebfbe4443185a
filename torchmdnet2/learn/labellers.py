"""Labellers compute the energy and forces of a frame. Each method is a class that is registered under a name.

A plug-in registers a class with `@LABELLERS.register("name")`. The arguments of the class are keys of `labels.labeller`
in the configuration.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.stated import Statement, confirmed
from ..errors import BadConfig, BadData, MissingBackend
from ..potentials import find_model
from ..registry import Registry

if TYPE_CHECKING:
    from ase import Atoms
    from ase.calculators.calculator import BaseCalculator

__all__ = ["LABELLERS", "Labeller", "LabellingFailed", "Labels", "make_labeller"]

LABELLERS: Registry[Any] = Registry("labeller")


class LabellingFailed(RuntimeError):
    """A frame could not be labelled; the message says why. The frame is put aside, and the others are labelled."""


class Labels(NamedTuple):
    """Labels of one frame.

    Attributes:
        energy: energy in eV.
        forces: [n, 3] forces in eV/Å.
    """

    energy: float
    forces: NDArray[np.float64]


class Labeller(ABC):
    """Base class of labellers. Each worker process makes one, from its name and arguments.

    A label must not depend on earlier frames, so that an interrupted run can be repeated: start every calculation from
    scratch.

    Attributes:
        level_of_theory: level of theory for model cards; frames of another level are refused.
        files: files that the labeller reads; a change of one between two starts of a run is an error.
    """

    level_of_theory: str
    files: tuple[str, ...] = ()

    def check(self) -> None:  # noqa: B027
        """Raise MissingBackend or BadConfig if a program or file is missing; called before the first label."""

    @abstractmethod
    def __call__(self, atoms: Atoms, folder: Path) -> Labels:
        """Label a frame.

        Args:
            atoms: the frame, with charge in e and multiplicity in `info` if known.
            folder: an empty folder for files, which is also the current one. It is kept if labelling fails.

        Raises:
            Exception: any error means that there is no label; its message is stored with the frame.
        """


def make_labeller(section: Mapping[str, Any]) -> Labeller:
    """Return the labeller of {"name": …, arguments}."""
    arguments = dict(section)
    return LABELLERS[arguments.pop("name")](**arguments)


@LABELLERS.register("gfn2-xtb")
class Gfn2Xtb(Labeller):
    """GFN2-xTB by tblite (pip install tblite).

    C. Bannwarth, S. Ehlert, S. Grimme, J. Chem. Theory Comput. 15, 1652 (2019), doi:10.1021/acs.jctc.8b01176.

    Args:
        accuracy: tblite's accuracy; smaller values are more accurate.
        electronic_temperature: electronic temperature in K.
        max_iterations: largest number of iterations of the charges; a frame that needs more is put aside.
    """

    method = "GFN2-xTB"

    def __init__(self, accuracy: float = 1.0, electronic_temperature: float = 300.0, max_iterations: int = 250):
        self.options = {
            "accuracy": accuracy,
            "electronic_temperature": electronic_temperature,
            "max_iterations": max_iterations,
        }
        self.level_of_theory = self.method

    def check(self) -> None:
        from importlib.util import find_spec

        if find_spec("tblite") is None:
            raise MissingBackend(f"labels.labeller: {self.method} needs tblite: pip install tblite")

    def __call__(self, atoms: Atoms, folder: Path) -> Labels:
        from tblite.ase import TBLite

        spin = int(atoms.info.get("spin", 0))
        options: dict[str, Any] = {**self.options, "charge": atoms.info.get("charge", 0), "verbosity": 0}
        if spin:
            options["multiplicity"] = spin
        return _by_calculator(atoms, TBLite(method=self.method, **options))


@LABELLERS.register("gfn1-xtb")
class Gfn1Xtb(Gfn2Xtb):
    """GFN1-xTB by tblite: S. Grimme, C. Bannwarth, P. Shushkov, J. Chem. Theory Comput. 13, 1989 (2017)."""

    method = "GFN1-xTB"


@LABELLERS.register("ase")
class AseLabeller(Labeller):
    """A calculator of ASE by its name, such as orca, psi4, cp2k, gaussian, vasp or espresso.

    ASE finds programs by its configuration file or the variables ASE_…_COMMAND; see its documentation.

    Args:
        calculator: name in ASE, in lower-case letters.
        level_of_theory: level of theory of the labels, for the model card.
        arguments: arguments of the calculator, as in {charge: 0, mult: 1, orcasimpleinput: "wB97X-D3 def2-TZVP
            EnGrad"}.
        charge_argument: the calculator's argument for the total charge of a frame in e; null: it has none.
        spin_argument: the calculator's argument for the multiplicity 2S+1; null: it has none.
    """

    def __init__(
        self,
        calculator: str,
        level_of_theory: str,
        arguments: dict[str, Any] | None = None,
        charge_argument: str | None = None,
        spin_argument: str | None = None,
    ):
        from ase.calculators.calculator import names

        if calculator not in names:
            from ..registry import did_you_mean

            hint = did_you_mean(calculator, names) or "."
            raise BadConfig(
                f"labels.labeller.calculator: ASE has no '{calculator}'{hint} It has {', '.join(sorted(names))}; "
                "others can be called by the labeller 'command'"
            )
        self.calculator, self.level_of_theory = calculator, level_of_theory
        self.arguments, self.keys = arguments or {}, {"charge": charge_argument, "spin": spin_argument}

    def check(self) -> None:
        try:
            self._make({})
        except ImportError as error:
            raise MissingBackend(f"labels.labeller: the calculator {self.calculator} cannot be used: {error}") from None
        except Exception as error:  # calculators raise errors of any kind
            raise BadConfig(
                f"labels.labeller: the calculator {self.calculator} cannot be made of these arguments: "
                f"{type(error).__name__}: {error}"
            ) from None

    def __call__(self, atoms: Atoms, folder: Path) -> Labels:
        own = {}
        for name, key in self.keys.items():
            value = int(atoms.info.get(name, 0))
            fixed = key or name
            if name in atoms.info and fixed in self.arguments:
                stated = [Statement(value, "the frame")] if value or name == "charge" else []
                try:
                    confirmed(stated, name, self.arguments[fixed], f"labels.labeller.arguments.{fixed}")
                except BadData as error:
                    raise LabellingFailed(str(error)) from None
            if key is not None and name in atoms.info:
                own[key] = value
            elif value > (1 if name == "spin" else 0) or value < 0:
                raise LabellingFailed(f"the frame has a {name} of {value}; set labels.labeller.{name}_argument")
        return _by_calculator(atoms, self._make(own))

    def _make(self, own: Mapping[str, Any]) -> BaseCalculator:
        from ase.calculators.calculator import get_calculator_class

        return get_calculator_class(self.calculator)(**{**self.arguments, **own})


@LABELLERS.register("teacher")
class Teacher(Labeller):
    """Another potential as teacher, in float64.

    Args:
        file: its .tmn file or name, or the ensemble.json of an ensemble.
        level_of_theory: level of theory of the labels; null: as stated in the file.
        device: cpu, cuda or cuda:N.
        level: the level of theory to use of a file with several; null: its default.
    """

    def __init__(self, file: str, level_of_theory: str | None = None, device: str = "cpu", level: str | None = None):
        found = find_model(file)
        self.file, self.device, self.files = str(found.absolute()), device, (str(found),)
        self.level = level
        self._calculator: BaseCalculator | None = None
        self.level_of_theory = level_of_theory or self._stated()

    def check(self) -> None:
        self._open()

    def __call__(self, atoms: Atoms, folder: Path) -> Labels:
        if self._calculator is None:
            self._calculator = self._open()
        return _by_calculator(atoms, self._calculator)

    def _stated(self) -> str:
        from ..checkpoint import read_header
        from ..ensemble import model_files
        from ..potential.levels import chosen_level

        levels = read_header(model_files(self.file)[0])["levels"]
        try:
            return chosen_level(self.level, levels) if self.level else (*levels, "not stated")[0]
        except ValueError as error:
            raise BadConfig(f"labels.labeller.{error}") from None

    def _open(self) -> BaseCalculator:
        from ..adapters.ase import CommitteeCalculator, TorchMDNet2Calculator

        kind = CommitteeCalculator if self.file.endswith(".json") else TorchMDNet2Calculator
        return kind(self.file, device=self.device, dtype="float64", level=self.level)


@LABELLERS.register("command")
class Command(Labeller):
    """A program that reads a frame from a file and writes it with labels to another. It runs with your rights.

    The program starts without a shell, in a separate folder: give full paths of the files that it reads. The input is
    extended XYZ, with charge and spin in the second line. The output has any format of ASE, with energy in eV and
    forces in eV/Å for the same atoms in the same order. An exit code other than 0 is a failure.

    Args:
        command: program and arguments; {input} and {output} stand for the names of the files.
        level_of_theory: level of theory of the labels, for the model card.
        output: name of the file that the program writes.
        format: name of the output's format in ase.io; null: the file's name decides.
    """

    def __init__(self, command: list[str], level_of_theory: str, output: str = "output.xyz", format: str | None = None):
        if not command or ("{output}" not in " ".join(command) and output == "output.xyz"):
            raise BadConfig("labels.labeller.command: must be a list: the program, and arguments with {output}")
        if Path(output).name != output:
            raise BadConfig(f"labels.labeller.output: must be the name of a file, without a folder, got {output}")
        program = str(Path(command[0]).absolute()) if Path(command[0]).name != command[0] else command[0]
        self.command, self.level_of_theory = [program, *command[1:]], level_of_theory
        self.output, self.format = output, format

    def check(self) -> None:
        from shutil import which

        if which(self.command[0]) is None:
            raise MissingBackend(f"labels.labeller.command: there is no program {self.command[0]}")

    def __call__(self, atoms: Atoms, folder: Path) -> Labels:
        from ase.io import read, write

        write(folder / "input.xyz", atoms, format="extxyz")
        words = [word.replace("{input}", "input.xyz").replace("{output}", self.output) for word in self.command]
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            code = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err).returncode
        if code:
            last = (folder / "stderr.txt").read_text(errors="replace").strip().splitlines()[-1:]
            raise LabellingFailed(": ".join([f"{words[0]} ended with exit code {code}", *last]))
        if not (folder / self.output).is_file():
            raise LabellingFailed(f"{words[0]} wrote no file {self.output}")
        found = read(folder / self.output, -1, format=self.format)
        assert not isinstance(found, list)
        if found.calc is None or not (found.numbers == atoms.numbers).all():
            raise LabellingFailed(f"{self.output} has no energy and forces of these atoms, in this order")
        return Labels(found.get_potential_energy(), found.get_forces())


def _by_calculator(atoms: Atoms, calculator: BaseCalculator) -> Labels:
    atoms = atoms.copy()
    atoms.set_constraint()  # constraints would set forces to zero
    atoms.calc = calculator
    return Labels(float(atoms.get_potential_energy()), np.array(atoms.get_forces(), dtype=np.float64))
