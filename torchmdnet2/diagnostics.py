"""What a bug report needs: versions, devices and backends."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

__all__ = ["surroundings"]

_PACKAGES = tuple("numpy ase h5py safetensors pydantic vesin numba triton openmm openmmml".split())
_SEARCHES = ("vesin", "triton", "torch_cluster")  # neighbor backends that need the module of their name


def surroundings() -> dict[str, Any]:
    """Plain data: "versions", "devices", "neighbors" and "kernels" that can run here, "models", "heads", "priors"."""
    import torch

    from .neighbors import BACKENDS
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
        "neighbors": [name for name in BACKENDS if name not in _SEARCHES or find_spec(name)],
        "kernels": ["reference", *(name for name, can in kernels.items() if can and find_spec(name))],
        "models": list(REPRESENTATIONS),
        "heads": list(HEADS),
        "priors": list(PRIORS),
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
