"""Files that grow by blocks of records, and how far they are: an interrupted run goes on at the next block."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..core.files import atomic_write, keep_old
from ..errors import BadConfig

__all__ = ["Journal"]


class Journal:
    """Appends to the files of a run; each block is there as a whole, or not at all.

    After each block, the number of its records and the sizes of the files are written to `OUT.progress`. A run that
    finds this file cuts the files to these sizes, which takes away a block that was written in part, and goes on. At
    the end the file is removed.

    Args:
        output, report: the files.
        job: what is computed, JSON-able.

    Attributes:
        done: records of the input whose results are in the files.

    Raises:
        BadConfig: the files belong to an unfinished run of another job.
        OSError: they cannot be written.
    """

    def __init__(self, output: Path, report: Path, job: dict[str, Any]):
        self._paths = (output, report)
        self._state = output.with_name(output.name + ".progress")
        self._job = json.loads(json.dumps(job))
        self.done, sizes = self._resume()
        self._files = [open(path, "r+b" if path.exists() else "w+b") for path in self._paths]
        for file, size in zip(self._files, sizes, strict=True):
            file.truncate(size)
            file.seek(size)

    def _resume(self) -> tuple[int, list[int]]:
        if self._state.exists():
            found = json.loads(self._state.read_text())
            if found["job"] != self._job:
                changed = sorted(k for k in {*found["job"], *self._job} if found["job"].get(k) != self._job.get(k))
                raise BadConfig(
                    f"{self._paths[0]} belongs to a run that was interrupted, of another {', '.join(changed)}: give "
                    f"the same command to finish it, or remove {self._state} to begin anew"
                )
            return found["records"], found["sizes"]
        for path in self._paths:
            keep_old(path)
        self._save(0, [0, 0])
        return 0, [0, 0]

    def _save(self, records: int, sizes: list[int]) -> None:
        atomic_write(self._state, json.dumps({"records": records, "sizes": sizes, "job": self._job}, indent=1))

    def commit(self, records: int, *texts: str) -> None:
        """Append the results of a block, and wait for the disk.

        Args:
            records: how many of the input they are of.
            texts: for the output and the report.
        """
        for file, text in zip(self._files, texts, strict=True):
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self.done += records
        self._save(self.done, [file.tell() for file in self._files])

    def close(self, finished: bool) -> None:
        """Close the files; of a finished run, nothing else is left. A report without a line is removed."""
        for file in self._files:
            file.close()
        if finished:
            if not self._paths[1].stat().st_size:
                self._paths[1].unlink()
            self._state.unlink()
