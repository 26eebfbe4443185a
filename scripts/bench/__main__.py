"""Benchmarks of torchmdnet2, compared with other programs if these are installed.

    python -m scripts.bench NAME [options]      runs one
    python -m scripts.bench NAME --help         says what it measures, and all its options

Run it in the folder of the repository. Options of the same name have the same meaning in all benchmarks. To time a
model on your machine, `torchmdnet2 bench` is enough.
"""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path

NAMES = (
    "inference", "tensornet2", "models", "training", "devices", "cpu", "neighbors", "md", "adapters", "lammps",
    "accuracy", "extrapolation", "learning", "novelty", "data", "front", "aimnet2",
)  # fmt: skip


def title(name: str) -> str:
    """The first line of a benchmark's documentation, without importing it."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a benchmark. Its module has `arguments(parser)` and `main(options)`."""
    module = import_module(f"scripts.bench.{name}")
    parser = argparse.ArgumentParser(
        f"python -m scripts.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.arguments(parser)
    parser.set_defaults(main=module.main)
    return parser


def main(given: list[str]) -> None:
    if not given or given[0] not in NAMES:
        unknown = "" if not given or given[0] in ("-h", "--help") else f"there is no benchmark {given[0]!r}\n\n"
        print(unknown + (__doc__ or ""))
        print("\n".join(f"{name:<14} {title(name)}" for name in NAMES))
        sys.exit(2 if unknown else 0)
    import torch

    parser = parser_of(given[0])
    options = parser.parse_args(given[1:])
    measures = not getattr(options, "redraw", None)
    if measures and getattr(options, "device", "cpu").startswith("cuda") and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here: choose --device cpu")
    options.main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
