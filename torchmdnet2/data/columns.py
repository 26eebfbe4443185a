"""Columns: flat little-endian arrays in files, written row by row and read through memory maps.

A column `name` is the file name.bin (its rows, nothing else) and the file name.crc with the CRC-32 of every 64 KiB.
A block is checked when it is first read, so that opening costs nothing and damage is never taken for data.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import BadData

__all__ = ["BLOCK", "Column", "ColumnWriter", "expand"]

BLOCK = 2**16
"""bytes under one checksum"""

_REMEDY = "Delete the folder, and it is made again"


def expand(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Indices of several ranges, one after the other: [2, 7], [3, 1] -> [2, 3, 4, 7].

    Args:
        first: [B] where each range begins.
        count: [B] its length.
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - count), count) + np.arange(total)


class ColumnWriter:
    """Appends rows to a column.

    Args:
        folder: where name.bin and name.crc go.
        name: of the column.
        dtype: of its numbers; written little-endian.
        row: shape of a row.
    """

    def __init__(self, folder: Path, name: str, dtype: str, row: tuple[int, ...] = ()):
        self.folder, self.name, self.dtype, self.row = folder, name, np.dtype(dtype).newbyteorder("<"), tuple(row)
        self.rows = 0
        self._file: BinaryIO = open(folder / f"{name}.bin", "wb")
        self._sums: list[int] = []
        self._sum = self._filled = 0

    def append(self, rows: np.ndarray) -> None:
        """Add rows, [n, *row]."""
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        if rows.shape[1:] != self.row:
            raise ValueError(f"column {self.name}: rows have the shape {rows.shape[1:]}, not {self.row}")
        self.rows += len(rows)
        data = memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._file.write(data)
        while len(data):
            part, data = data[: BLOCK - self._filled], data[BLOCK - self._filled :]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._sums.append(self._sum)
                self._sum = self._filled = 0

    def fill(self, rows: int, value: float = np.nan) -> None:
        """Add rows of one value until there are so many in all."""
        while self.rows < rows:
            self.append(np.full((min(rows - self.rows, 65_536), *self.row), value, dtype=self.dtype))

    def finish(self) -> dict[str, Any]:
        """Flush to disk, and what `Column` needs to read it again, as plain data."""
        if self._filled:
            self._sums.append(self._sum)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        sums = np.array(self._sums, dtype="<u4").tobytes()
        with open(self.folder / f"{self.name}.crc", "wb") as file:
            file.write(sums)
            file.flush()
            os.fsync(file.fileno())
        return {
            "dtype": self.dtype.str,
            "row": list(self.row),
            "rows": self.rows,
            "crc_sha256": hashlib.sha256(sums).hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


class Column:
    """Rows of a column, read through a memory map.

    Args:
        folder: where its files are.
        name: of the column.
        facts: what `ColumnWriter.finish` gave.

    Raises:
        BadData: a file is missing, longer or shorter than it was, or the checksums themselves are damaged.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]):
        self.path = folder / f"{name}.bin"
        dtype, row, rows = np.dtype(facts["dtype"]), tuple(facts["row"]), int(facts["rows"])
        self._row_bytes = dtype.itemsize * int(np.prod(row, dtype=np.int64))
        size = rows * self._row_bytes
        try:
            sums = (folder / f"{name}.crc").read_bytes()
            found = self.path.stat().st_size
        except OSError as error:
            raise BadData(f"{self.path}: this part of the cache cannot be read: {error}. {_REMEDY}") from error
        if found != size:
            raise BadData(f"{self.path}: it is {found} bytes long instead of {size}; the cache is damaged. {_REMEDY}")
        if hashlib.sha256(sums).hexdigest() != facts["crc_sha256"]:
            raise BadData(f"{folder / name}.crc: the checksums are damaged. {_REMEDY}")
        self._sums = np.frombuffer(sums, dtype="<u4")
        self._checked = np.zeros(len(self._sums), dtype=bool)
        if size:
            self._bytes = np.asarray(np.memmap(self.path, dtype=np.uint8, mode="r"))
        else:  # an empty file cannot be mapped
            self._bytes = np.zeros(0, dtype=np.uint8)
        self._rows: np.ndarray = self._bytes.view(dtype).reshape(rows, *row)

        self._made_of = (folder, name, dict(facts))

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name: another process maps the file again instead of being sent its content."""
        return Column, self._made_of

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def all(self) -> np.ndarray:
        """Every row, checked; a view of the file."""
        self.check(np.zeros(1, dtype=np.int64), np.array([len(self)]))
        return self._rows

    def rows(self, index: np.ndarray) -> np.ndarray:
        """Single rows, [len(index), *row]."""
        self.check(index, np.ones_like(index))
        return self._rows.take(index, axis=0)

    def ranges(self, first: np.ndarray, count: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
        """The rows of several ranges, one after the other, [sum(count), *row].

        Args:
            first, count: [B] as for `expand`.
            index: `expand(first, count)` where it is known already.
        """
        self.check(first, count)
        return self._rows.take(expand(first, count) if index is None else index, axis=0)

    def check(self, first: np.ndarray, count: np.ndarray) -> None:
        """Raise BadData when one of the rows is damaged; each block is looked at once."""
        if not count.all():
            first, count = first[count > 0], count[count > 0]
        low = first * self._row_bytes // BLOCK
        high = ((first + count) * self._row_bytes - 1) // BLOCK
        if len(low) and int((high - low).max()) > 1:
            blocks = np.unique(expand(low, high - low + 1))
        else:
            blocks = np.concatenate([low, high])
        new = blocks[~self._checked[blocks]]
        for block in np.unique(new).tolist() if len(new) else ():
            part = memoryview(self._bytes[block * BLOCK : (block + 1) * BLOCK])  # type: ignore[arg-type]
            if zlib.crc32(part) != int(self._sums[block]):
                raise BadData(
                    f"{self.path}: the cache is damaged between bytes {block * BLOCK} and "
                    f"{min((block + 1) * BLOCK, self.nbytes)}. {_REMEDY}"
                )
            self._checked[block] = True
