import errno
import os

import pytest

from torchmdnet2.core.files import atomic_write


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a.txt", "old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        atomic_write(tmp_path / "a.txt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "old"
