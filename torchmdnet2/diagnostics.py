"""Facts that a bug report needs: versions, devices and backends."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import MISSING, unmet

__all__ = ["surroundings"]

_PACKAGES = tuple("numpy ase h5py safetensors pydantic vesin numba triton openmm openmmml".split())
_SEARCHES = ("vesin", "triton", "torch_cluster")  # neighbor backends that need the module of their name

_FOR_DEVELOPERS = {"all", "dev", "docs"}
"""Extras that are not shown to users."""


def surroundings() -> dict[str, Any]:
    """Return the facts that `torchmdnet2 info` prints, as plain data.

    Returns:
        "versions", "devices", "gpu" (whether it is used, and why not), "extras" (installed, or missing packages),
        "neighbors" and "kernels" that can run here, "kernel caches" (folders), "potentials", "models", "heads",
        "priors".
    """
    import torch

    from .neighbors import BACKENDS
    from .potentials import named_models
    from .registry import HEADS, PRIORS, REPRESENTATIONS, load_plugins
    from .version import __version__

    load_plugins()
    devices = {"cpu": f"{platform.machine()}, cores: {os.cpu_count()}, threads in torch: {torch.get_num_threads()}"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    kernels = {"numba": True, "triton": torch.cuda.is_available()}
    return {
        "versions": {
            "torchmdnet2": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "torch": str(torch.__version__),  # with its build, CPU or CUDA
            **{name: _installed(name) for name in _PACKAGES},
        },
        "devices": devices,
        "gpu": _gpu(),
        "extras": extras(),
        "neighbors": [name for name in BACKENDS if name not in _SEARCHES or find_spec(name)],
        "kernels": ["reference", *(name for name, can in kernels.items() if can and find_spec(name))],
        "kernel caches": {"numba": str(_numba_cache()), "triton": str(_triton_cache())},
        "potentials": sorted(named_models()),
        "models": list(REPRESENTATIONS),
        "heads": list(HEADS),
        "priors": list(PRIORS),
    }


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return MISSING


def _gpu() -> str:
    """Say whether an NVIDIA GPU is used; if not, the reason and the remedy."""
    import torch

    if torch.version.cuda is None:
        return (
            f"not used: PyTorch {torch.__version__} is built without CUDA. For an NVIDIA GPU, install a "
            "CUDA build of PyTorch (pytorch.org)"
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is '{visible}'"
        return (
            f"not used: PyTorch is built for CUDA {torch.version.cuda}, and finds no GPU{hidden}. `nvidia-smi` shows "
            "the GPUs, and the CUDA version that the driver supports"
        )
    if not find_spec("triton"):
        return "used without compiled kernels, which is slow: pip install 'torchmdnet2[gpu]'"
    return f"used, with compiled kernels (CUDA {torch.version.cuda})"


def extras() -> dict[str, str]:
    """Return extra -> "installed", or what is missing or too old; empty if pip did not install this package."""
    try:
        required = metadata.requires("torchmdnet2") or []
    except metadata.PackageNotFoundError:
        return {}
    names = dict.fromkeys(re.findall(r"extra == ['\"]([\w-]+)", "\n".join(required)))
    return {name: _words(unmet(name)) for name in names if name not in _FOR_DEVELOPERS}


def _words(lacking: Mapping[str, str]) -> str:
    missing = [name for name, why in lacking.items() if why == MISSING]
    words = [f"{MISSING}: {', '.join(missing)}"] if missing else []
    return "; ".join(words + [f"{name} {why}" for name, why in lacking.items() if why != MISSING]) or "installed"


def _numba_cache() -> Path:
    """Return where numba keeps compiled kernels: in the package, or elsewhere if it cannot be written."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(__file__).parent
    if folder:
        return Path(folder)
    return package if os.access(package, os.W_OK) else Path.home() / ".cache" / "numba"


def _triton_cache() -> Path:
    """Return where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
