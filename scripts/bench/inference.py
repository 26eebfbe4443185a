"""Time energy and forces of TensorNet on one GPU: the Evaluator and, when it is installed, TorchMD-Net.

    python -m scripts.bench inference [--systems FOLDER] [--parts exact,ours,eager,graph,compile] [--output FILE]

Each system is evaluated as a whole step: neighbor search, energy, forces. "replay" is a step without leaving the device
(`Evaluator.bind`); "call" is `evaluator(system)` with its results back in Python; "potential" is the reference path,
eager. Errors are the largest of any force component and of the energy against the Potential in float64. All use the
same weights. "mixed" and "tf32" are as "ours" in these precisions; "scan" times other launch shapes in mixed precision,
and each kernel in float32 and mixed precision. "elements" times the embedding by edges and by elements in turns,
"shapes" other launch shapes of both. With --elements 3,4 each box of water is also there with so many elements.
"composed" replays the network with priors. "blocks" evaluates boxes that do not fit into the memory block by block, in
mixed precision and float32, and compares a smaller box with a whole step. "startup" is a fresh process: seconds to its
first result and to that of a second molecule.

Each part runs in a separate process, and its results are written after every system: a part that fails or runs out of
time does not harm the others. Parts joined by + run at the same time: those that are not timed, the exact results and
compilation ("warm", "warm_tf32", "warm_mixed", "warm_compile", "warm_scan", "warm_elements", "warm_shapes"), which
fills the caches on disk that the timed parts then find. PART:K/N takes every Nth system.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.errors import MissingBackend
from torchmdnet2.models.tensornet.gpu import MOST_ELEMENTS, Block, MessageTile
from torchmdnet2.neighbors import neighbor_list

from .harness import Row, again, save_rows, shared
from .inference_report import plot, summary, table
from .peer import MODES, peer_step
from .systems import (
    COMPOSED,
    MODEL,
    WATER,
    forget,
    make_potential,
    named_systems,
    once,
    peak,
    synchronize,
    timed,
    water_box,
)
from .tensornet2 import by_kernel, held

_COMPILATION = "+".join(f"{part}:{k}/2" for part in ("warm", "warm_tf32", "warm_compile") for k in range(2))
PARTS = (f"exact+{_COMPILATION}", "ours", "composed", "eager", "graph", "compile", "potential", "tf32", "startup")
EXACT_UP_TO = 31_000  # atoms; in float64
EAGER_UP_TO = 31_000
PEER_UP_TO = 100_000
WARM_UP_TO = {"float32": 100_000, "tf32": 100_000, "mixed": 100_000, "compile": 31_000}
SCAN_FROM, SCAN_UP_TO = 1_000, 20_000
_PRODUCTS = "mix", "update", "gradient_product", "gradient_mix"
SCAN: list[tuple[tuple[str, ...], list[Any]]] = [
    (("interaction",), [MessageTile(16, 1, 64, 16), MessageTile(8, 1, 64, 8), MessageTile(8, 2, 32, 8),
                        MessageTile(1, 4, 32, 1), MessageTile(1, 2, 64, 1)]),
    (("message_backward",), [MessageTile(16, 1, 64, 16), MessageTile(8, 1, 64, 8), MessageTile(16, 1, 32, 8),
                             MessageTile(1, 2, 32, 1), MessageTile(1, 2, 64, 1)]),
    (_PRODUCTS, [Block(8, 32, 32, 8, 1, 4), Block(8, 64, 32, 8, 1, 2), Block(16, 64, 32, 4, 3), Block(16, 32, 64, 4, 2),
                 Block(32, 64, 32, 8, 3)]),
    (("embedding_backward",), [MessageTile(1, 4, 32, 1)]),
]  # fmt: skip
"""Other shapes, for all kernels of the names together."""
_SEVERAL = [MessageTile(8, 2, 64, 8), MessageTile(16, 1, 64, 16), MessageTile(8, 1, 32, 4)]
EMBEDDING_SCAN: dict[str, list[tuple[str, list[Any]]]] = {
    "by edges": [("embedding", _SEVERAL), ("embedding_backward", _SEVERAL)],
    "by elements": [
        ("element_sums", [MessageTile(1, 2, 32, 1), MessageTile(1, 4, 32, 1), MessageTile(1, 8, 32, 1)]),
        ("element_edges", [MessageTile(1, 8, 32, 1), MessageTile(4, 1, 32, 1), MessageTile(8, 1, 32, 2)]),
        ("element_product", [Block(16, 64, 32, 8), Block(16, 32, 32, 4)]),
        ("element_gradient", [Block(16, 32, 32, 2, 3), Block(16, 32, 32, 4, 2), Block(16, 32, 16, 4, 3)]),
    ],
}
"""Other shapes of the embedding."""
_IN_TURNS_UP_TO = 300_000  # atoms: several steps fit into the memory


def errors(exact: dict[str, torch.Tensor] | None, forces: torch.Tensor, energy: torch.Tensor | None = None) -> Row:
    """Largest errors against float64; the energy of TorchMD-Net has another zero."""
    if exact is None:
        return {}
    reference = exact["forces"].to(forces.device)
    row = {
        "force_error": float((forces.detach().double() - reference).abs().max()),
        "largest_force": float(reference.abs().max()),
    }
    if energy is not None:
        difference = float((energy.double().cpu().reshape(-1) - exact["energy"]).abs().max())
        row["energy_error"] = difference / max(float(exact["energy"].abs().max()), 1e-9)
    return row


# --- parts: rows of one system ---------------------------------------------------------------------------------------


def ours(potential: Potential, system: System, exact: Any, precision: str = "float32") -> Iterator[Row]:
    """Rows "replay" and "call"."""
    evaluator = Evaluator(potential, precision=precision)  # type: ignore[arg-type]
    suffix = "" if precision == "float32" else f" {precision}"
    bound, first = once(lambda: evaluator.bind(system))
    row = {"mode": f"replay{suffix}", "first_s": first, **timed(bound.replay)}
    if not bound.check():
        raise RuntimeError("the edges did not fit, although bind chooses the capacity")
    yield {**row, **errors(exact, bound.forces, bound.energy), "peak_GB": peak()}
    del bound
    forget()
    result, first = once(lambda: evaluator(system))
    _, second = once(lambda: evaluator(system))
    row = {"mode": f"call{suffix}", "first_s": first, "second_s": second, **timed(lambda: evaluator(system))}
    yield {**row, **errors(exact, result.forces, result.energy), "peak_GB": peak(), "report": evaluator.report()}


def blocks(potential: Potential, system: System, block_atoms: int | None) -> Iterator[Row]:
    """Rows of a smaller box in blocks, beside a whole step, and of the system."""
    small = water_box(32).to(system.device)
    for precision in ("mixed", "float32"):
        yield _beside_whole_step(potential, small, precision, 60_000)
        forget()
        yield _in_blocks(potential, system, precision, block_atoms)
        forget()


def _beside_whole_step(potential: Potential, system: System, precision: str, block_atoms: int) -> Row:
    whole = Evaluator(potential, precision)(system, stress=True)  # type: ignore[arg-type]
    forget()
    evaluator = Evaluator(potential, precision, block_atoms=block_atoms)  # type: ignore[arg-type]
    found, again = evaluator(system, stress=True), evaluator(system, stress=True)
    row: Row = {"mode": f"blocks {precision}, {system.num_atoms} atoms"}
    for name in ("energy", "atom_energies", "forces", "stress"):
        of_whole, of_blocks = getattr(whole, name), getattr(found, name)
        row[f"largest_{name}"] = float(of_whole.abs().max())
        row[f"{name}_difference"] = float((of_blocks - of_whole).abs().max())
    row["same_bits"] = torch.equal(found.forces, again.forces) and torch.equal(found.stress, again.stress)
    return {**row, "report": evaluator.report()}


def _in_blocks(potential: Potential, system: System, precision: str, block_atoms: int | None) -> Row:
    evaluator = Evaluator(potential, precision, block_atoms=block_atoms)  # type: ignore[arg-type]
    _, first = once(lambda: evaluator(system))
    report = evaluator.report()
    bound = evaluator.bind(system)
    forget()  # what was tried and did not fit does not count
    row = {"mode": f"blocks {precision}", "first_s": first, **timed(bound.replay, seconds=3.0, most=5)}
    if not bound.check():
        raise RuntimeError("the edges did not fit, although a step in blocks makes room for them")
    print(report, flush=True)
    return {**row, "us_per_atom": 1e3 * row["ms"] / system.num_atoms, "peak_GB": peak(), "report": report}


def composed(system: System, names: str) -> Iterator[Row]:
    """Rows "replay" of the network with priors, one after the other beside the plain network."""
    for name in names.split(",") if names else (*COMPOSED, "morse"):
        potential = make_potential(name).to(system.pos.device)
        try:
            evaluator = Evaluator(potential)
            bound, first = once(partial(evaluator.bind, system))
            row: Row = {"mode": f"replay, {name}", "first_s": first, **timed(bound.replay), "peak_GB": peak()}
            yield {**row, "report": evaluator.report()}
            del bound
        except (RuntimeError, ValueError, MissingBackend) as error:
            yield {"mode": f"replay, {name}", "error": str(error)[:300]}
        forget()


def eager(potential: Potential, system: System, exact: Any) -> Iterator[Row]:
    """Row "potential"."""
    if system.num_atoms <= EAGER_UP_TO:
        result, first = once(lambda: potential(system))
        row = {"mode": "potential", "first_s": first, **timed(lambda: potential(system), seconds=0.2)}
        yield {**row, **errors(exact, result.forces, result.energy), "peak_GB": peak()}


def peer(potential: Potential, system: System, exact: Any, mode: str) -> Iterator[Row]:
    """Row "torchmd-net MODE"."""
    if system.num_atoms <= PEER_UP_TO:
        (step, forces), first = once(lambda: (lambda s: (s, s()))(peer_step(potential, system, mode)))
        row = {"mode": f"torchmd-net {mode}", "first_s": first, **errors(exact, forces)}
        yield {**row, **timed(step), "peak_GB": peak()}


def warm(potential: Potential, system: System, what: str) -> Iterator[Row]:
    """Compile the kernels of a system; returns seconds, measured while other work runs."""

    def compile_it() -> None:
        if what == "compile":
            step = peer_step(potential, system, what)
            for _ in range(3):  # the third call is the first without compilation
                step()
        else:
            Evaluator(potential, precision=what).bind(system)  # type: ignore[arg-type]

    if system.num_atoms <= WARM_UP_TO[what]:
        yield {"mode": f"compilation, {what}", "compile_s": once(compile_it)[1]}


def scan(potential: Potential, system: System, measured: bool) -> Iterator[Row]:
    """Rows of other launch shapes in mixed precision, and of milliseconds by kernel; only compile if not measured."""
    if not SCAN_FROM <= system.num_atoms <= SCAN_UP_TO:
        return
    model = FusedModel(potential, "mixed")
    if measured:
        for precision, one in (("native", FusedModel(potential, "native")), ("mixed", model)):
            yield {"mode": f"kernels {precision}", "kernels": by_kernel(one, system)}
    chosen = model.net.launch_shapes(system.num_atoms)
    for names, shapes in SCAN:
        for shape in shapes:
            row: Row = {"mode": f"scan {names[0]} {shape}"}
            try:
                graphed = held(model, system, replace(chosen, **dict.fromkeys(names, shape)))
                row |= timed(graphed.run, seconds=0.1) if measured else {}
                del graphed
            except Exception as error:  # the others are timed too
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            yield row


def elements(potential: Potential, system: System, exact: Any, measured: bool) -> Iterator[Row]:
    """Rows of the embedding by edges and by elements, float32 and mixed, in turns; only compile if not measured.

    With 10,000 to 20,000 atoms also milliseconds by kernel.
    """
    large = system.num_atoms > _IN_TURNS_UP_TO
    ways = {way: given for way, given in _ways(potential, system).items() if not large or "by elements" in way}
    rows: dict[str, Row] = {}
    steps: dict[str, Any] = {}
    forces: dict[str, torch.Tensor] = {}
    for way, (model, shapes) in ways.items():
        forget()
        before = peak()
        step, first = once(partial(held, model, system, shapes))
        found = step.results()
        difference = found.forces - forces.setdefault(way.split()[0], found.forces)
        row: Row = {
            "mode": way,
            "first_s": first,
            "peak_GB": peak() - before,
            "difference": float(difference.abs().max()),
        }
        rows[way] = row | errors(exact, found.forces, found.energy)
        if large:
            rows[way] |= timed(step.run, seconds=3.0, most=9)
        else:
            steps[way] = step
        del step
    for _ in range(3 if measured else 0):
        for way, step in steps.items():
            found_ms = timed(step.run, seconds=0.2)
            rows[way] = min(rows[way], rows[way] | found_ms, key=lambda row: row.get("ms", float("inf")))
    yield from rows.values()
    if measured and 10_000 <= system.num_atoms <= 20_000:
        steps.clear()
        for way, (model, shapes) in ways.items():
            yield {"mode": f"kernels {way}", "kernels": by_kernel(model, system, shapes)}


def _ways(potential: Potential, system: System) -> dict[str, tuple[FusedModel, Any]]:
    """Models and launch shapes of the embedding by edges and by elements, by "PRECISION by …"."""
    ways, elements = {}, tuple(system.z.unique().tolist())
    for name, precision in (("mixed", "mixed"), ("float32", "native")):
        model = FusedModel(potential, precision)
        chosen: Any = model.net.launch_shapes(system.num_atoms)
        ways[f"{name} by edges"] = model, chosen
        if len(elements) <= MOST_ELEMENTS:
            ways[f"{name} by elements"] = model, replace(chosen, elements=elements)
    return ways


def embedding_shapes(potential: Potential, system: System, measured: bool) -> Iterator[Row]:
    """Rows of other launch shapes of the embedding; only compile if not measured."""
    if not SCAN_FROM <= system.num_atoms <= SCAN_UP_TO:
        return
    for way, (model, chosen) in _ways(potential, system).items():
        others = EMBEDDING_SCAN[way.split(" ", 1)[1]]
        for name, shape in [("chosen", None), *((name, shape) for name, shapes in others for shape in shapes)]:
            row: Row = {"mode": f"{way}, {name} {shape or ''}"}
            try:
                step = held(model, system, chosen if shape is None else replace(chosen, **{name: shape}))
                row |= timed(step.run, seconds=0.1) if measured else {}
                del step
            except Exception as error:  # the others are timed too
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            yield row


def exactly(potential: Potential, system: System, path: Path) -> Iterator[Row]:
    """Write float64 results to a file; returns a row with the number of edges."""
    row: Row = {"mode": "exact", "edges": neighbor_list(system, potential.cutoff).num_edges}
    if system.num_atoms <= EXACT_UP_TO:
        result = copy.deepcopy(potential).double()(system.to(dtype=torch.float64))
        assert result.forces is not None
        save_file({"forces": result.forces.cpu(), "energy": result.energy.cpu()}, path)
    yield row


def startup(folder: Path | None, device: str, began: float) -> Iterator[Row]:
    """Seconds since the start of this process."""
    potential = make_potential().to(device)
    systems = [make() for make in list(named_systems(folder, "7").values())[:3]]
    synchronize()
    row: Row = {"system": "fresh process", "atoms": 0, "mode": "startup", "import_s": time.time() - began}
    evaluator = Evaluator(potential)
    for k, system in enumerate(systems):
        system = system.to(device)
        _, row[f"first_{system.num_atoms}_s"] = once(lambda system=system: evaluator(system))  # type: ignore[misc]
        _, row[f"second_{system.num_atoms}_s"] = once(lambda system=system: evaluator(system))  # type: ignore[misc]
        if k == 0:
            row["to_first_result_s"] = time.time() - began
    yield row


# --- one part in this process ----------------------------------------------------------------------------------------


def run_part(part: str, options: argparse.Namespace) -> None:
    """Write the rows of all systems to a file of JSON lines."""
    folder, device = Path(options.work), options.device
    file_name = _file_name(part)
    part, _, share = part.partition(":")
    turn, turns = map(int, share.split("/")) if share else (0, 1)
    warnings.simplefilter("ignore")

    def write(row: Row) -> None:
        with (folder / file_name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k != "report"}, flush=True)

    if part == "startup":
        for row in startup(options.systems, device, options.began):
            write(row)
        return
    potential = make_potential().to(device)
    systems = named_systems(
        options.systems, options.water, options.copies if part in ("ours", "warm") else 0, options.elements
    )
    sizes = [(make().num_atoms, name, make) for name, make in systems.items()]
    for atoms, name, make in sorted(s for s in sizes if s[0] <= options.largest)[turn::turns]:
        if time.time() > options.deadline:
            write({"system": name, "atoms": atoms, "mode": part, "error": "the time was over"})
            continue
        forget()
        path = folder / f"{re.sub('[ ,]+', '_', name)}.safetensors"
        exact = load_file(path) if path.exists() and part != "exact" else None
        system = make().to(device)
        runs: dict[str, Callable[[], Iterator[Row]]] = {
            "exact": lambda s=system, p=path: exactly(potential, s, p),  # type: ignore[misc]
            "warm": lambda s=system: warm(potential, s, "float32"),  # type: ignore[misc]
            "warm_tf32": lambda s=system: warm(potential, s, "tf32"),  # type: ignore[misc]
            "warm_mixed": lambda s=system: warm(potential, s, "mixed"),  # type: ignore[misc]
            "warm_scan": lambda s=system: scan(potential, s, False),  # type: ignore[misc]
            "warm_elements": lambda s=system, e=exact: elements(potential, s, e, False),  # type: ignore[misc]
            "elements": lambda s=system, e=exact: elements(potential, s, e, True),  # type: ignore[misc]
            "warm_shapes": lambda s=system: embedding_shapes(potential, s, False),  # type: ignore[misc]
            "shapes": lambda s=system: embedding_shapes(potential, s, True),  # type: ignore[misc]
            "scan": lambda s=system: scan(potential, s, True),  # type: ignore[misc]
            "mixed": lambda s=system, e=exact: ours(potential, s, e, "mixed"),  # type: ignore[misc]
            "warm_compile": lambda s=system: warm(potential, s, "compile"),  # type: ignore[misc]
            "ours": lambda s=system, e=exact: ours(potential, s, e),  # type: ignore[misc]
            "tf32": lambda s=system, e=exact: ours(potential, s, e, "tf32"),  # type: ignore[misc]
            "blocks": lambda s=system: blocks(potential, s, options.block_atoms),  # type: ignore[misc]
            "composed": lambda s=system: composed(s, options.priors),  # type: ignore[misc]
            "potential": lambda s=system, e=exact: eager(potential, s, e),  # type: ignore[misc]
            **{m: lambda s=system, e=exact, m=m: peer(potential, s, e, m) for m in MODES},  # type: ignore[misc]
        }
        try:
            for row in runs[part]():
                write({"system": name, "atoms": atoms, **row})
        except Exception as error:  # of any kind: another program is timed too
            message = f"{type(error).__name__}: {str(error)[:300]}"
            write({"system": name, "atoms": atoms, "mode": part, "error": message})
            if "CUDA error" in message and not isinstance(error, torch.cuda.OutOfMemoryError):
                raise  # nothing works in this process any more


# --- all parts, each in its own process ------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> list[Row]:
    """Run all parts; rows are also written to `--output` after each."""
    rows: list[Row] = []
    budget = 60 * options.minutes
    end = time.time() + budget
    with tempfile.TemporaryDirectory() as work:
        groups = [group.split("+") for group in options.parts.split(",")]
        for k, group in enumerate(groups):
            # what comes later needs something too
            left = end - time.time() - 12 * (len(groups) - k - 1)
            left = min(left, 0.35 * budget) if len(group) > 1 else left
            deadline = time.time() + max(1.0, left)
            started = time.time()
            running = {part: subprocess.Popen(_command(part, work, deadline, options)) for part in group}
            for part, process in running.items():
                try:
                    process.wait(max(5.0, (deadline if len(group) > 1 else end) - time.time()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    print(f"{part}: stopped", flush=True)
                found = Path(work) / _file_name(part)
                rows += [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
            print(f"{'+'.join(group)}: {time.time() - started:.0f} s", flush=True)
            save_rows(options.output, rows, {"model": MODEL})
    return rows


def _file_name(part: str) -> str:
    return re.sub(r"[:/]", "-", part) + ".jsonl"


def _command(part: str, work: str, deadline: float, options: argparse.Namespace) -> list[str]:
    return [
        *again("inference", "--began", time.time(), "--part", part, "--work", work),
        *("--deadline", str(deadline), "--water", options.water, "--copies", str(options.copies)),
        *("--device", options.device, "--largest", str(options.largest), "--priors", options.priors),
        *("--elements", options.elements),
        *(["--block-atoms", str(options.block_atoms)] if options.block_atoms else []),
        *(["--systems", str(options.systems)] if options.systems else []),
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(
        parser,
        device="cuda",
        systems=None,
        water=",".join(map(str, WATER)),
        minutes=60.0,
        output=None,
        plot=None,
        redraw=None,
    )
    parser.add_argument("--copies", type=int, default=256, help="alanine dipeptides in a batch")
    parser.add_argument("--elements", default="", help="numbers of elements of further boxes of water, such as 3,4")
    parser.add_argument("--largest", type=int, default=10**9, help="leave out systems of more atoms")
    parser.add_argument("--parts", default=",".join(PARTS), help="what is run, in this order")
    parser.add_argument("--priors", default="", help=f"priors of part composed: {', '.join((*COMPOSED, 'morse'))}")
    parser.add_argument("--block-atoms", type=int, help="atoms of a block in part blocks; default: what fits")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.part:
        run_part(options.part, options)
        return
    rows = json.loads(options.redraw.read_text())["rows"] if options.redraw else run_all(options)
    print(table(rows), summary(rows), sep="\n\n")
    if options.plot:
        plot(rows, options.plot)
