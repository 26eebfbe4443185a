"""A cache of very many frames: made and opened without holding them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MANY = """
import sys, time, torch
from torchmdnet2.data import CachedDataset, Sample
from torchmdnet2.data.cache import write_cache
from torchmdnet2.data.reader import Chunk
from torchmdnet2.system import System
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
seen = []
def chunks(total, step=1000):
    z = torch.tensor([8, 1, 1])
    for first in range(0, total, step):
        seen.append(resident())
        generator = torch.Generator().manual_seed(first)
        pos = torch.randn(3 * step, 3, generator=generator, dtype=torch.float64)
        system = System(z=z.repeat(step), pos=pos, batch=torch.arange(step).repeat_interleave(3))
        yield Chunk(Sample(system, {"energy": pos[::3, 0].clone(), "forces": -pos}), "many", first)
from pathlib import Path
root, total = Path(sys.argv[1]), int(sys.argv[2])
write_cache(root / "few", chunks(5000))
CachedDataset(root / "few").edges(3.0)
before = resident()
seen.clear()
write_cache(root / "many", chunks(total))
grown = max(seen) - before
CachedDataset(root / "many").edges(3.0)
start = time.process_time()
data = CachedDataset(root / "many")
data.batch([0, total // 2, total - 1])
opened = time.process_time() - start
size = sum(path.stat().st_size for path in (root / "many").iterdir() if path.is_file()) / 2**20
print(len(data), grown, size, opened)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_frames(tmp_path):
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("memory is read from /proc")
    output = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path), "200000"], capture_output=True, text=True, check=True
    ).stdout.split()
    frames, grown, size, opened = int(output[0]), *map(float, output[1:])
    print(f"{frames} frames, {size:.0f} MiB written with {grown:.1f} MiB more memory, opened in {1e3 * opened:.0f} ms")
    assert frames == 200_000 and size > 40
    assert grown < 15
    assert opened < 0.5


MANY_GROUPS = """
import sys, numpy as np, h5py
from torchmdnet2.data.hdf5 import HDF5Dataset
def resident():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024
def write(path, groups):
    with h5py.File(path, "w") as file:
        for k in range(groups):
            group = file.create_group(f"{k:06d}")
            group["types"], group["pos"], group["energy"] = [8, 1, 1], np.zeros((1, 3, 3)), [1.0]
            for name in ("pos", "energy"):
                group[name].attrs["units"] = {"pos": "angstrom", "energy": "eV"}[name]
def read(path):
    return sum(chunk.sample.system.num_systems for chunk in HDF5Dataset(path).chunks())
write(sys.argv[1] + "few.h5", 200)
write(sys.argv[1] + "many.h5", 1000)
read(sys.argv[1] + "few.h5")
before = resident()
print(read(sys.argv[1] + "many.h5"), resident() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_groups(tmp_path):
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("memory is read from /proc")
    output = subprocess.run(
        [sys.executable, "-c", MANY_GROUPS, f"{tmp_path}/"], capture_output=True, text=True, check=True
    ).stdout.split()
    print(f"{output[0]} groups read with {float(output[1]):.1f} MiB more memory")
    assert int(output[0]) == 1000 and float(output[1]) < 7  # 14 where HDF5 keeps what it likes
