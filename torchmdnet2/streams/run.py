"""The functions relax and score for files and lists of structures."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from numbers import Integral, Real
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..adapters.model import Opening
from ..core.devices import devices_of
from ..core.files import claimed, load_h5py, spare_inputs
from ..core.pipeline import (
    Journal,
    Stages,
    Work,
    blocks_of,
    helpers_for,
    left_text,
    rate_text,
    through,
)
from ..data.structures import Beside
from ..ensemble import model_files
from ..errors import BadConfig, BadData, StructureWarning
from ..md.guard import remedy_of_close_atoms
from ..md.setup import fingerprint
from ..potential.cells import require_cells
from ..potential.potential import Potential
from .batches import BatchOptions
from .conformers import Preparation, Ranking, require_rdkit
from .records import (
    Outcome,
    Outcomes,
    Record,
    RecordFile,
    Results,
    convert_to_hdf5,
    csv_head,
    is_hdf5,
    require_writable,
)  # fmt: skip
from .relaxing import CellRelaxer, Relaxer, RelaxOptions
from .report import require_plots, write_report
from .scoring import Block, Scorer

if TYPE_CHECKING:
    from ase import Atoms
    from distributed import Client
    from rich.console import Console

__all__ = ["Summary", "devices_for", "identity", "relax", "score"]

Model: TypeAlias = "str | os.PathLike | Potential | Sequence[str | os.PathLike | Potential]"

_LARGE = 2**22  # bytes
_FIRST = 1000  # structures that are looked at for cells
_BONDS = (".sdf", ".mol", ".smi", ".smiles")


def relax(
    model: Model,
    structures: str | os.PathLike | Atoms | Sequence[Atoms],
    output: str | os.PathLike | None = None,
    *,
    fmax: float = 0.02,
    steps: int = 1000,
    conformers: int | None = None,
    ranking: Ranking | None = None,
    seed: int | None = None,
    cell: bool = False,
    devices: str | Sequence[str] = "auto",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str | None = None,
    level: str | None = None,
    block: int | None = None,
    report: bool = False,
    dask: str | Client | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Relax many structures in batches by L-BFGS.

    A structure that fails does not end the run: it has no result, and its error is in the outcome and in the report.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential. A committee, whose mean is taken, is a list of
            these, names separated by commas, or an ensemble.json.
        structures: a file of SDF, SMILES, or what `torchmdnet2.data.read_structures` reads; or one or several
            `ase.Atoms`. FixAtoms is kept.
        output: an .sdf, .xyz, .csv or .h5 file. Failures are listed beside it in `OUT.failed.txt`. The same call
            continues a run that was killed after its last complete block.
        fmax: largest force of a converged structure, eV/Å.
        steps: largest number of steps of each structure.
        conformers: number of conformers that RDKit makes of each molecule by distance geometry. None makes one for a
            SMILES and takes structures of other files unchanged.
        ranking: choice of the conformers to keep; default: those within 0.26 eV of the lowest, without duplicates.
        seed: seed of the distance geometry, 0 or more; None takes 0. It is refused where no conformers are made.
        cell: relax the cells too, at zero pressure, by ASE and one structure after another. Otherwise cells are fixed.
        devices: "auto" (the first GPU, else the CPU), "all", or names ("cuda:0,cuda:1", "cpu"); each has a process.
        dtype: floating-point type of the network; None: as stored.
        allow_untrained_charge: accept total charges that the model was not trained on, with a warning.
        coulomb: method for Coulomb sums over all pairs in cells, "pme" or "dsf", as for `torchmdnet2.load`; None takes
            "pme", or the method of a given Potential.
        level: level of theory, for a model that was trained on several; None takes its default.
        block: records that are computed, written and, after a kill, repeated together; default: 128 for each
            process on CPUs, 1024 to 4096 on GPUs, fewer with conformers.
        report: also write a page, `OUT.html`, with distributions, failures and pictures of the lowest structures.
        dask: a cluster of the package distributed, by the address of its scheduler or a client: its workers compute
            the blocks, each on the one device of `devices`. They must find the model at the same path.
        console: where progress is shown; None is silent.

    Returns:
        An `Outcome` for each record, in order, if there is no output; otherwise an empty list. The `info` of a
        structure has energy (eV), largest_force (eV/Å), steps, converged, bonds_changed (how many), novelty (of
        calibrated models), and of conformers conformer and relative_energy (eV).

    Raises:
        BadConfig: an option is not valid.
        FileNotFoundError, BadCheckpoint: there is no such file, or the model's is damaged.
        ValueError: the dtype, `coulomb` or level is none of the model.
        MissingBackend: a package is not installed: RDKit for SMILES or conformers, h5py, matplotlib, distributed.
        BadData: with an output, there are no structures in the input, or all of them fail.
    """
    if not (isinstance(fmax, Real) and 0 < fmax < math.inf):
        raise BadConfig(f"fmax must be a positive number of eV/Å, such as 0.02, got {fmax!r}")
    _require_whole("steps", steps, 1)
    if conformers is not None:
        _require_whole("conformers", conformers, 1)
    structures = _several(structures)
    source = _Source(structures, conformers, seed)
    source.require_cells(coulomb)
    members = _members(model)
    opening = Opening(dtype, allow_untrained_charge, coulomb, level)
    remedy = _checked(members, opening)
    if cell and len(members) > 1:
        raise BadConfig("cell: cells are relaxed with one model, not with several")
    if cell and conformers is not None:
        raise BadConfig("cell: conformers are molecules, which have no cell; leave out one of cell and conformers")
    if ranking is not None and conformers is None:
        raise BadConfig("ranking has no effect: it chooses among conformers, but none are made; give conformers too")
    if block is not None:
        _require_whole("block", block, 1)
    ranking = (ranking or Ranking()) if conformers is not None else None
    options = RelaxOptions(fmax=fmax, steps=steps, ranking=ranking)
    names = devices_for(devices, model, dask)
    if block is None:
        block = max(1, (128 if names[0] == "cpu" else max(1024, 4096 // len(names))) // (conformers or 1))
    worker = partial(_worker, CellRelaxer if cell else Relaxer, members, options, opening)
    stages = Stages(source.preparation, partial(_relaxing, worker), methodcaller("outcomes"))
    job = _job(members, structures, options, opening, conformers=conformers, seed=seed or 0, cell=cell)
    return _stream(source, stages, names, block, output, job, console, report, dask, remedy)


def score(
    model: Model,
    structures: str | os.PathLike | Atoms | Sequence[Atoms],
    output: str | os.PathLike | None = None,
    *,
    novelty: bool = True,
    seed: int | None = None,
    devices: str | Sequence[str] = "auto",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str | None = None,
    level: str | None = None,
    block: int | None = None,
    report: bool = False,
    dask: str | Client | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Compute energies, forces, charges and novelty of many structures.

    Args:
        model: as for `relax`.
        structures: as for `relax`.
        output: as for `relax`.
        novelty: compute the novelty too, with calibrated models.
        seed: as for `relax`.
        devices: as for `relax`.
        dtype: as for `relax`.
        allow_untrained_charge: as for `relax`.
        coulomb: as for `relax`.
        level: as for `relax`.
        block: number of records that are computed and written together, and repeated after a kill; default: 1024
            on CPUs, 4096 on GPUs.
        report: as for `relax`.
        dask: as for `relax`.
        console: as for `relax`.

    Returns:
        As for `relax`. The `info` of a structure has energy (eV), largest_force (eV/Å) and novelty; its `arrays` have
        forces [N, 3] (eV/Å) and, if the model predicts them, charges [N] (e).

    Raises:
        BadConfig: an option is not valid.
        FileNotFoundError: a file does not exist.
        MissingBackend: a package is not installed, as for `relax`.
        BadData: with an output: the input has no structures, or all of them fail.
    """
    if block is not None:
        _require_whole("block", block, 1)
    structures = _several(structures)
    source = _Source(structures, None, seed)
    source.require_cells(coulomb)
    options, members = BatchOptions(novelty), _members(model)
    opening = Opening(dtype, allow_untrained_charge, coulomb, level)
    remedy = _checked(members, opening)
    job = _job(members, structures, options, opening, seed=seed or 0)
    worker = partial(_worker, Scorer, members, options, opening)
    stages = Stages(partial(_side_by_side, source.preparation), partial(_scoring, worker), methodcaller("outcomes"))
    names = devices_for(devices, model, dask)
    block = block or (1024 if names[0] == "cpu" else 4096)
    return _stream(source, stages, names, block, output, job, console, report, dask, remedy)


def _require_whole(name: str, number: Any, least: int) -> None:
    if not (isinstance(number, Integral) and int(number) >= least):
        raise BadConfig(f"{name} must be at least {least}, got {number!r}; give a whole number")


def _several(structures: Any) -> Any:
    """Return a path, or the structures as a list; a single `Atoms` would be iterated over its atoms."""
    if hasattr(structures, "get_positions"):
        return [structures]
    if isinstance(structures, str | os.PathLike):
        return structures
    found = list(structures)
    for atoms in found:
        if not hasattr(atoms, "get_positions"):
            raise TypeError(f"structures must be a file or ase.Atoms, got {type(atoms).__name__}")
    return found


def _members(model: Model) -> list[str | Potential]:
    """Return the models, by absolute paths, since other processes may have another current folder."""
    if isinstance(model, str | os.PathLike):
        return [str(Path(name).resolve()) if Path(name).is_file() else name for name in model_files(model)]
    return [model] if isinstance(model, Potential) else [member for each in model for member in _members(each)]


def _checked(models: Sequence[str | Potential], opening: Opening) -> str:
    """Open the models before files are written and processes are started, so that errors come at once.

    Returns:
        The remedy where atoms are nearer than any bond; "" if the models repel them.
    """
    return remedy_of_close_atoms([opening.open(model) for model in models])


def _worker(
    kind: Callable[[Potential, Any, Sequence[Potential]], Any],
    models: Sequence[str | Potential],
    options: Any,
    opening: Opening,
    device: str,
) -> Any:
    (device,) = devices_of(device)
    first, *others = (opening.open(model, device) for model in models)
    return kind(first, options, others)


def _relaxing(worker: Callable[[str], Any], device: str) -> Work:
    work = worker(device)
    return lambda records: Outcomes(work(records))


def _scoring(worker: Callable[[str], Scorer], device: str) -> Work:
    return worker(device).score


def _side_by_side(preparation: Preparation, records: Iterable[Record]) -> Block:
    return Block.of(preparation(records))


def devices_for(names: str | Sequence[str], model: Model, dask: Any) -> list[str]:
    """Return devices as `devices_of`; for a cluster, the name that each worker resolves."""
    if dask is None:
        return devices_of(names)
    if not (isinstance(dask, str) or hasattr(dask, "submit")):
        raise BadConfig(
            "dask: must be the address of a scheduler, such as 'tcp://HOST:8786', or a distributed.Client, got "
            f"{dask!r}"
        )
    if any(isinstance(member, Potential) for member in _members(model)):
        raise BadConfig("dask: give the path or the name of the model, which every worker reads")
    if not isinstance(names, str) or names == "all" or "," in names:
        raise BadConfig("dask: each worker uses one device: auto, cpu or cuda:0")
    return [names]


def identity(thing: Any) -> Any:
    """Return data that distinguish a file from other files and later versions."""
    if isinstance(thing, str | os.PathLike) and Path(thing).is_file():
        facts = Path(thing).stat()
        return [str(Path(thing).resolve()), facts.st_size, facts.st_mtime_ns]
    if isinstance(thing, str | os.PathLike):
        return str(thing)
    if isinstance(thing, Potential):
        return ["in memory", fingerprint(thing)]
    digest = hashlib.sha256()
    for atoms in thing:
        for value in (atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc):
            digest.update(value.tobytes())
        digest.update(repr([atoms.info.get(name) for name in ("charge", "spin")]).encode())
    return ["in memory", digest.hexdigest()]


class _Source:
    """Records with their starts, in order."""

    def __init__(self, structures: Any, conformers: int | None, seed: int | None):
        if seed is not None:
            _require_whole("seed", seed, 0)
        self.preparation = Preparation(conformers, seed or 0)
        self.file = RecordFile(str(structures)) if isinstance(structures, str | os.PathLike) else None
        if self.file is not None and self.file.splits:
            beside = Beside(self.file.path)
            for one in (*beside.charge, *beside.spin):
                if one.value:
                    warnings.warn(
                        f"{self.file.path}: {one.source} is not read, since the file may hold many molecules: write "
                        "charge=… and spin=… into its records",
                        StructureWarning,
                        stacklevel=4,
                    )
        self._given = structures
        self._ends: deque[float] = deque()
        suffix = "".join(Path(str(structures)).suffixes).lower() if self.file else ""
        self.has_bonds = any(part in suffix for part in _BONDS)
        smiles = ".smi" in suffix
        if conformers is not None and not self.has_bonds:
            raise BadConfig("conformers need molecules with bonds: give SMILES or an SDF")
        if smiles or conformers is not None:
            require_rdkit()
        #: Whether conformers are made.
        self.embeds = smiles or conformers is not None
        if seed is not None and not self.embeds:
            raise BadConfig(
                f"seed={seed} has no effect: only conformers need it, which are made for SMILES and where their number "
                "is given; leave it out"
            )
        #: True if the input is so large that further processes besides the GPU's save time.
        self.takes_long = self.embeds or (self.file is not None and self.file.size > _LARGE)

    def require_cells(self, coulomb: str | None) -> None:
        """Refuse a sum in cells where no structure is periodic; of a file, its first structures are looked at.

        Raises:
            ValueError: the sum would have no effect.
        """
        if coulomb in (None, "pme"):
            return
        if self.file is None:
            found: Iterable[Atoms] = self._given
        elif self.has_bonds:
            found = ()
        else:
            first = list(islice(self.file, _FIRST + 1))
            if len(first) > _FIRST:  # there may be cells later
                return
            found = [atoms for record in first for atoms in record.starts]
        require_cells(coulomb, [atoms.pbc for atoms in found])

    def blocks(self, first: int, size: int) -> Iterator[Iterable[Record]]:
        """Yield blocks of `size` records, beginning with record number `first`."""
        if self.file is None:
            given = (Record(k, starts=[atoms]) for k, atoms in enumerate(self._given))
            blocks: Iterator[Iterable[Record]] = blocks_of(islice(given, first, None), size)
        else:
            blocks = self.file.blocks(first, size)
        for block in blocks:
            self._ends.append(0.0 if self.file is None else self.file.fraction)
            yield block

    def end_of_block(self) -> float:
        """Return the part of the file up to the end of the next block whose results are there, from 0 to 1; 0 if
        unknown."""
        return self._ends.popleft()


@dataclass
class _Written:
    """A block of results as text.

    Attributes:
        records, structures, failed, unconverged: numbers of these.
        results, failures: text for the files.
        rows: text for the table of the report.
        near: lines about structures with atoms nearer than any bond.
    """

    records: int
    structures: int
    failed: int
    unconverged: int
    results: str
    failures: str
    rows: list[str]
    near: list[str]


def _write(suffix: str, report: bool, found: Results) -> _Written:
    failures = found.failures()
    records, structures, unconverged = found.count()
    return _Written(
        records, structures, len(failures), unconverged, found.text(suffix),
        "".join(_failures(record, errors) for record, errors in failures), found.rows() if report else [],
        found.near(),
    )  # fmt: skip


def _stream(
    source: _Source,
    stages: Stages,
    devices: list[str],
    block: int,
    output: str | os.PathLike | None,
    job: dict[str, Any],
    console: Console | None,
    report: bool,
    dask: str | Client | None,
    remedy: str,
) -> list[Outcome]:
    """Compute all records, into the output or, without one, into a list."""
    summary = Summary()
    helpers = helpers_for(devices, dask) if source.takes_long else 0

    def computed(first: int) -> Iterator[Any]:
        blocks = source.blocks(first, block)
        size = source.file.size if source.file is not None else 0
        return through(blocks, stages, devices, __name__, helpers, source.embeds, dask, output is not None, size)

    if output is None:
        if report:
            raise BadConfig("report: the report is written beside the output, but no output is given")
        outcomes = [outcome for found in computed(0) for outcome in found]
        summary.take(Outcomes(outcomes).near())
        summary.warn(remedy)
        return outcomes
    path = Path(output)
    require_writable(str(path), source.has_bonds)
    stages = replace(stages, finish=partial(_write, path.suffix.lower(), report))
    results = path.with_name(path.name + ".xyz") if is_hdf5(path) else path
    if is_hdf5(path):
        load_h5py()
    failed, rows = path.with_name(path.stem + ".failed.txt"), path.with_name(path.stem + ".rows.csv")
    if report:
        require_plots()
    files, pages = [results, failed, *([rows] if report else [])], [path.with_suffix(".html")] if report else []
    read = [one[0] for one in (job["input"], *job["model"]) if isinstance(one, list) and Path(one[0]).is_file()]
    spare_inputs([path, *files, *pages], map(Path, read), "choose another output")
    with claimed(path, *files, *pages):
        journal = Journal(path, files, {**job, "report": report})
        first = journal.done
        summary.resume(journal.kept or {})
        if first and console is not None:
            console.print(f"{path}: continues after {first} records", highlight=False, markup=False, soft_wrap=True)
        status = console.status("the first records are computed") if console is not None else nullcontext()
        with journal.writing("records"):
            with status:
                for written in computed(first):
                    new, end = not journal.done, source.end_of_block()
                    seconds = summary.add(written)
                    texts = [csv_head(results) * new + written.results, written.failures]
                    if report:
                        head = csv_head(rows).replace("\n", ",seconds\n") * new
                        texts.append(head + "".join(f"{row[:-1]},{seconds:.3g}\n" for row in written.rows))
                    journal.commit(written.records, *texts, kept=summary.kept())
                    if console is not None:
                        status.update(summary.words(end, first))  # type: ignore[union-attr]
            if not journal.done:
                raise BadData(f"{source.file.path + ': ' if source.file else ''}the input has no structures")
            if report:
                write_report(path.with_suffix(".html"), _title(path, job), rows, failed, results)
            if is_hdf5(path):
                convert_to_hdf5(results, path)
        for temporary in [*([rows] if report else []), *([results] if results != path else [])]:
            temporary.unlink()
        with open(failed, encoding="utf-8") as file:
            reason = file.readline().strip()
        if not reason:
            failed.unlink()
        if not summary.structures:
            raise BadData(f"none of {summary.records} records could be computed, see {failed}; {reason}")
        if console is not None:
            lines = [f"{summary.words(1.0, first)}; wrote {path}"]
            if reason:
                lines.append(f"failures are in {failed}; the first: {reason}")
            console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    summary.warn(remedy)
    return []


def _job(
    members: Sequence[Any], structures: Any, options: BatchOptions, opening: Opening, **more: Any
) -> dict[str, Any]:
    """Return what must be the same when an interrupted run continues, by the names of the options."""
    settings = {name: repr(value) for name, value in {**vars(options), **opening._asdict(), **more}.items()}
    return {"model": [identity(member) for member in members], "input": identity(structures), **settings}


def _title(path: Path, job: dict[str, Any]) -> str:
    """Return the title of a report from the files and models, which `identity` gave."""
    model, source = (
        ", ".join(Path(one if isinstance(one, str) else one[0]).name for one in each)
        for each in (job["model"], [job["input"]])
    )
    return f"{path.name}: {source} by {model}"


def _failures(record: Record, errors: Sequence[str]) -> str:
    """Return a line for each kind of failure of a record."""
    counts = Counter(errors)
    return "".join(
        f"{record}: {error}{f' ({count} conformers)' if count > 1 else ''}\n" for error, count in counts.items()
    )


class Summary:
    """Counts of a run, and its rate."""

    _KEPT = ("records", "structures", "failed", "unconverged", "near", "first_near")

    def __init__(self) -> None:
        self.records = self.structures = self.failed = self.unconverged = self.near = 0
        self.first_near = ""
        self._began = self._last = time.monotonic()

    def add(self, written: _Written) -> float:
        """Add the counts of a block; return its time divided by the number of structures, s."""
        before, self._last = self._last, time.monotonic()
        for name in self._KEPT[:4]:
            setattr(self, name, getattr(self, name) + getattr(written, name))
        self.take(written.near)
        return (self._last - before) / max(1, written.structures)

    def kept(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {name: getattr(self, name) for name in self._KEPT}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `kept` returned."""
        vars(self).update(kept)

    def take(self, near: Sequence[str]) -> None:
        """Count structures with atoms nearer than any bond, and keep the first."""
        self.near += len(near)
        self.first_near = self.first_near or next(iter(near), "")

    def warn(self, remedy: str) -> None:
        """Warn of these structures, once, unless the models repel such atoms."""
        if self.near and remedy:
            have = "1 structure has" if self.near == 1 else f"{self.near} structures have"
            words = f"{have} atoms nearer than any bond, first {self.first_near}: {remedy}"
            warnings.warn(words, StructureWarning, stacklevel=4)

    def words(self, fraction: float, before: int) -> str:
        """Return a line with counts, the rate and the time left.

        Args:
            fraction: part of the input up to the end of these records; 0 if unknown.
            before: number of records from an earlier run.
        """
        seconds, new = time.monotonic() - self._began, self.records - before
        text = f"{self.records} records, {self.structures} structures, {rate_text(new, seconds)} records/s"
        if 0 < fraction < 1 and new:
            read = new / self.records * fraction
            text += left_text(seconds * (1 - fraction) / max(read, 1e-9))
        for count, words in ((self.failed, "with failures"), (self.unconverged, "not converged")):
            text += f", {count} {words}" if count else ""
        return text
