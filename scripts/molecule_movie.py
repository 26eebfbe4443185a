r"""Render a trajectory of a molecule as a moving picture, balls and sticks with light and shadow.

    torchmdnet2 md organic examples/data/ibuprofen.xyz --time 6 --ensemble nvt --friction 10 --every 8 \
        --output runs/film
    python scripts/molecule_movie.py runs/film.xyz docs/bench/ibuprofen.gif

Translation and rotation of the molecule are removed. Of a long trajectory, the part whose last frame is most like its
first is shown, so that the picture repeats without a visible jump. Needs the packages ase, scipy and pillow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.data.colors import jmol_colors
from ase.io import read
from PIL import Image
from scipy.ndimage import gaussian_filter, maximum_filter, minimum_filter

STICK, BALL = 0.13, 0.43  # radius of a stick in Å; radius of a ball in covalent radii
COLORS = {1: (0.93, 0.93, 0.91), 6: (0.26, 0.49, 0.56), 7: (0.22, 0.40, 0.86), 8: (0.88, 0.20, 0.17)}
LIGHT = np.array([-0.45, 0.62, 0.64])  # from the upper left, in front


def aligned(frames: list[Atoms]) -> np.ndarray:
    """Positions [frames, N, 3] in Å about the center, turned onto the first frame, the longest axis along x."""
    every = np.array([frame.positions - frame.positions.mean(0) for frame in frames])
    heavy = frames[0].numbers > 1
    axes = np.linalg.svd(every[0])[2]
    target = every[0] @ (axes.T * [1, 1, np.linalg.det(axes)])
    for k, positions in enumerate(every):
        left, _, right = np.linalg.svd(positions[heavy].T @ target[heavy])
        flip = np.diag([1, 1, np.linalg.det(left @ right)])
        every[k] = positions @ left @ flip @ right
    return every


def loop(positions: np.ndarray, length: int) -> np.ndarray:
    """The start of `length` frames, at positions [frames, N, 3], whose end fits best to their start."""
    if len(positions) <= length + 1:
        return positions[:length]
    apart = ((positions[length:] - positions[:-length]) ** 2).sum((1, 2))
    start = int((apart[:-1] + apart[1:]).argmin()) + 1  # two frames in a row are alike: so are the velocities
    return positions[start : start + length]


def turned(positions: np.ndarray, tilt: float, swing: float) -> np.ndarray:
    """Positions [N, 3] seen from a little above (`tilt`) and from the side (`swing`), both in degrees."""
    a, b = np.radians([tilt, swing])
    about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    about_y = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    return positions @ about_y.T @ about_x.T


class Canvas:
    """Depth, normal and color of what each pixel shows; orthographic, the viewer is at z = +∞."""

    def __init__(self, width: int, height: int, scale: float) -> None:
        """Args: width, height: in pixels. scale: pixels per Å."""
        self.scale = scale
        self.x = (np.arange(width) - (width - 1) / 2) / scale
        self.y = ((height - 1) / 2 - np.arange(height)) / scale
        self.depth = np.full((height, width), -np.inf)
        self.normal = np.zeros((height, width, 3))
        self.color = np.ones((height, width, 3))

    def _window(self, low: np.ndarray, high: np.ndarray) -> tuple[slice, slice, np.ndarray, np.ndarray]:
        columns = slice(*np.searchsorted(self.x, [low[0], high[0]]))
        rows = slice(*np.searchsorted(-self.y, [-high[1], -low[1]]))
        return rows, columns, *np.meshgrid(self.x[columns], self.y[rows])

    def _put(
        self, rows: slice, columns: slice, seen: np.ndarray, z: np.ndarray, normal: np.ndarray, color: np.ndarray
    ) -> None:
        nearer = seen & (z > self.depth[rows, columns])
        self.depth[rows, columns][nearer] = z[nearer]
        self.normal[rows, columns][nearer] = normal[nearer]
        self.color[rows, columns][nearer] = np.broadcast_to(color, normal.shape)[nearer]

    def ball(self, center: np.ndarray, radius: float, color: np.ndarray) -> None:
        """Draw a sphere."""
        rows, columns, x, y = self._window(center - radius, center + radius)
        dx, dy = x - center[0], y - center[1]
        inside = radius**2 - dx**2 - dy**2
        dz = np.sqrt(np.maximum(inside, 0))
        self._put(rows, columns, inside > 0, center[2] + dz, np.stack([dx, dy, dz], -1) / radius, color)

    def stick(self, start: np.ndarray, end: np.ndarray, radius: float, color: np.ndarray) -> None:
        """Draw a cylinder without caps: of |p + z e - (p + z e)·a a|² = r² along the view e, the nearer solution."""
        rows, columns, x, y = self._window(np.minimum(start, end) - radius, np.maximum(start, end) + radius)
        axis = (end - start) / np.linalg.norm(end - start)
        p = np.stack([x - start[0], y - start[1], np.full_like(x, -start[2])], -1)
        along = p @ axis
        p_across, e_across = p - along[..., None] * axis, np.array([0, 0, 1]) - axis[2] * axis
        a, b, c = e_across @ e_across, p_across @ e_across, (p_across**2).sum(-1) - radius**2
        root = b**2 - a * c
        z = (-b + np.sqrt(np.maximum(root, 0))) / max(a, 1e-9)
        along = along + z * axis[2]
        normal = (p_across + z[..., None] * e_across) / radius
        self._put(rows, columns, (root > 0) & (along > 0) & (along < np.linalg.norm(end - start)), z, normal, color)

    def picture(self) -> np.ndarray:
        """The picture with light and shadow, [height, width, 3] between 0 and 1."""
        covered = np.isfinite(self.depth)
        light = LIGHT / np.linalg.norm(LIGHT)
        half = light + np.array([0, 0, 1])
        half /= np.linalg.norm(half)
        diffuse = np.clip(self.normal @ light, 0, 1)
        shine = np.clip(self.normal @ half, 0, 1) ** 60
        facing = np.clip(self.normal[..., 2], 0, 1)
        shade = 0.44 + 0.16 * facing + 0.52 * diffuse
        deepest = self.depth[covered].min()
        depth = np.where(covered, self.depth, deepest - 0.6)
        shade -= np.clip(gaussian_filter(depth, 0.22 * self.scale) - depth, 0, 1) * 0.32  # less light in hollows
        color = self.color * np.clip(shade, 0, 1.1)[..., None] + 0.45 * shine[..., None]
        far = np.clip((depth.max() - depth) / 16, 0, 0.35)[..., None]
        color = color * (1 - far) + far  # what is far away is paler
        width = max(3, int(0.035 * self.scale) | 1)
        edge = maximum_filter(depth, width) - minimum_filter(depth, width) > 0.5
        ink = gaussian_filter(edge.astype(float), 0.012 * self.scale)[..., None]
        color = np.where(covered[..., None], color, 1.0)
        return np.clip(color * (1 - 0.66 * ink) + 0.66 * ink * np.array([0.10, 0.12, 0.18]), 0, 1)


def render(
    numbers: np.ndarray, positions: np.ndarray, bonds: np.ndarray, width: int, height: int, scale: float
) -> Image.Image:
    """Render one frame.

    Args:
        numbers: atomic numbers, [N].
        positions: Å, [N, 3], the viewer at z = +∞.
        bonds: pairs of atoms, [bonds, 2].
        width, height: in pixels.
        scale: pixels per Å.
    """
    fine = 2  # each pixel is the mean of 2 × 2
    canvas = Canvas(fine * width, fine * height, fine * scale)
    colors = [np.array(COLORS.get(int(z), jmol_colors[z])) for z in numbers]
    for i, j in bonds:
        middle = (positions[i] + positions[j]) / 2
        for atom in (i, j):  # each half has the color of its atom
            canvas.stick(positions[atom], middle, STICK, colors[atom])
    for z, position, color in zip(numbers, positions, colors, strict=True):
        canvas.ball(position, BALL * covalent_radii[z] + 0.12, color)
    fine_pixels = canvas.picture().reshape(height, fine, width, fine, 3)
    return Image.fromarray(np.uint8(fine_pixels.mean((1, 3)) * 255 + 0.5))


def movie(trajectory: Path, output: Path, width: int, height: int, length: int, step: int) -> None:
    """Write the moving picture.

    Args:
        trajectory: any file of ASE with one molecule.
        output: .gif.
        width, height: in pixels.
        length: number of frames of the picture.
        step: take each step-th frame.
    """
    frames = read(trajectory, f"::{step}")
    numbers = frames[0].numbers
    radii = covalent_radii[numbers]
    bonds = np.argwhere(np.triu(frames[0].get_all_distances() < 1.2 * (radii[:, None] + radii), 1))
    positions = loop(aligned(frames), length)
    phases = np.arange(len(positions)) / len(positions)
    views = [turned(p, 22, 24 * np.sin(2 * np.pi * t)) for p, t in zip(positions, phases, strict=True)]
    low, high = np.concatenate(views).min(0) - 0.65, np.concatenate(views).max(0) + 0.65  # with the radius of an atom
    scale = min(width / (high - low)[0], height / (high - low)[1])
    pictures = [render(numbers, view - (low + high) / 2, bonds, width, height, scale) for view in views]
    several = Image.fromarray(np.concatenate([np.asarray(picture) for picture in pictures[:: len(pictures) // 4]]))
    palette = several.quantize(48, dither=Image.Dither.NONE)
    colors = np.reshape(palette.getpalette(), (-1, 3))
    colors[colors.min(1) > 249] = 255  # the background is white, and not nearly so
    palette = Image.new("P", (1, 1))
    palette.putpalette(colors.ravel().tolist())
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    small[0].save(output, save_all=True, append_images=small[1:], duration=60, loop=0, optimize=True)
    print(f"{output}: {len(small)} frames, {output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trajectory", type=Path, help="any file of ASE with one molecule")
    parser.add_argument("output", type=Path, help=".gif")
    parser.add_argument("--size", type=int, nargs=2, default=[800, 380], help="pixels (default: 800 380)")
    parser.add_argument("--frames", type=int, default=46, help="of the picture (default: 46)")
    parser.add_argument("--step", type=int, default=1, help="take each step-th frame (default: 1)")
    options = parser.parse_args()
    movie(options.trajectory, options.output, *options.size, options.frames, options.step)
