"""Tables and a plot of the results of the benchmark inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "floor", "plot", "summary", "table"]

Row = dict[str, Any]

_NAMES = {
    "replay": "torchmdnet2",
    "replay tf32": "torchmdnet2, TF32",
    "potential": "torchmdnet2, plain PyTorch",
    "torchmd-net eager": "TorchMD-Net",
    "torchmd-net graph": "TorchMD-Net, CUDA graph",
    "torchmd-net compile": "TorchMD-Net, compiled",
}

# one NVIDIA H200, TensorNet with F = 128 and L = 2; docs/dev/performance.md counts them
_LAUNCHES, _LAUNCH_US = 31, 2.0
_EDGE_BYTES, _L1 = 55e3, 29.6e12
_ATOM_BYTES, _DRAM = 276e3, 4.27e12


def floor(atoms: float, edges: float) -> float:
    """Lower limit of the time of a step, ms: its launches, or its gathers from L1 and its fields from memory."""
    return max(_LAUNCHES * _LAUNCH_US * 1e-3, (edges * _EDGE_BYTES / _L1 + atoms * _ATOM_BYTES / _DRAM) * 1e3)


def table(rows: list[Row]) -> str:
    """One line per system and mode."""
    numbers = "".join(f" {title:>9}" for title in ("ms", "low", "high", "dF eV/Å", "dE/E"))
    lines = [f"{'system':<24} {'atoms':>9} {'mode':<20}{numbers} {'GB':>7} {'first s':>8}"]
    order = {name: k for k, name in enumerate(dict.fromkeys(r["system"] for r in rows))}
    for r in sorted(rows, key=lambda r: (r["atoms"], order[r["system"]])):
        name = f"{r['system']:<24} {r['atoms']:>9} {r['mode']:<20}"
        if "error" in r:
            lines.append(f"{name} {r['error'][:100]}")
        elif r["mode"] == "startup" or "compile_s" in r:
            lines.append(name + " ".join(f"{k} {v:.2f}" for k, v in r.items() if k.endswith("_s")))
        elif "ms" in r:
            accuracy = "".join(f" {r[k]:>9.1e}" if k in r else f" {'-':>9}" for k in ("force_error", "energy_error"))
            times = "".join(f" {r[k]:>9.4f}" for k in ("ms", "low", "high"))
            others = (f" {r[k]:>{width}.2f}" if k in r else "" for k, width in (("peak_GB", 7), ("first_s", 8)))
            lines.append(f"{name}{times}{accuracy}{''.join(others)}")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """One line per system: ours, the peer's best mode, the ratio; force errors, ours over the peer's eager one."""
    lines = [
        f"{'system':<24} {'atoms':>9} {'ours ms':>9} {'peer ms':>9} {'mode':<8} {'ratio':>6} {'dF':>8} {'peer dF':>8} "
        f"{'ratio':>6} {'floor':>8}"
    ]
    for name in dict.fromkeys(r["system"] for r in rows):
        of = {r["mode"]: r for r in rows if r["system"] == name}
        mine = of.get("replay", {})
        if "ms" not in mine:
            continue
        peers = {m.split()[1]: r for m, r in of.items() if m.startswith("torchmd-net") and "ms" in r}
        best = min(peers, key=lambda m: peers[m]["ms"], default="")
        line = f"{name:<24} {mine['atoms']:>9} {mine['ms']:>9.4f}"
        line += f" {peers[best]['ms']:>9.3f} {best:<8} {peers[best]['ms'] / mine['ms']:>6.1f}" if best else " " * 26
        wrong = [r.get("force_error") for r in (mine, peers.get("eager", {}))]
        line += "".join(f" {'-':>8}" if w is None else f" {w:>8.1e}" for w in wrong)
        line += f" {wrong[0] / wrong[1]:>6.2f}" if wrong[0] and wrong[1] else f" {'-':>6}"
        edges = of.get("exact", {}).get("edges")
        lines.append(line + (f" {floor(mine['atoms'], edges):>8.3f}" if edges else ""))
    return "\n".join(lines)


def plot(rows: list[Row], path: str) -> None:
    """Milliseconds against atoms, both logarithmic, with the floor."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    draw(rows, axes)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def draw(rows: list[Row], axes: Axes) -> None:
    """Draw the plot into axes."""
    for mode in dict.fromkeys(r["mode"] for r in rows if "ms" in r and not r["mode"].startswith("call")):
        points = sorted(
            (r["atoms"], r["ms"]) for r in rows if r["mode"] == mode and "ms" in r and " x " not in r["system"]
        )
        style = "--" if mode.startswith("torchmd-net") else "-"
        axes.loglog(*zip(*points, strict=True), f"o{style}", label=_NAMES.get(mode, mode), markersize=4)
    floors = sorted((r["atoms"], floor(r["atoms"], r["edges"])) for r in rows if "edges" in r)
    if floors:
        axes.loglog(*zip(*floors, strict=True), "k:", label="lower limit")
    axes.set(xlabel="atoms", ylabel="ms per step (neighbor search, energy, forces)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
