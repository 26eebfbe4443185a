import errno
import os
import threading
from concurrent.futures import Future

import pytest

from torchmdnet2.core import pipeline
from torchmdnet2.core.files import atomic_write
from torchmdnet2.core.pipeline import Journal


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a.txt", "old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        atomic_write(tmp_path / "a.txt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "old"


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_full_disk_while_a_block_is_written(tmp_path, blocks):
    """The error names the file; the blocks before it stay, and the run continues with the next one."""
    resource = pytest.importorskip("resource")
    files = [tmp_path / "a.xyz", tmp_path / "a.failed.txt"]
    journal = Journal(files[0], files, {})
    for _ in range(blocks):
        journal.commit(1, "one\n", "")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*a\.xyz'"):
            journal.commit(1, "two" * 3000, "")
        journal.close(False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in sorted(tmp_path.iterdir())] == (
        ["a.failed.txt", "a.xyz", "a.xyz.progress"] if blocks else []
    )
    journal = Journal(files[0], files, {})
    assert journal.done == blocks
    journal.commit(1, "two\n", "")
    journal.close(True)
    assert files[0].read_text() == "one\n" * blocks + "two\n"


def test_a_block_that_cannot_be_written_is_not_in_the_state(tmp_path, monkeypatch):
    """After a block that has not waited for the disk: else a run would continue after the lost block."""
    files = [tmp_path / "out.xyz", tmp_path / "out.failed.txt"]
    journal = Journal(files[0], files, {})
    journal.commit(1, "a\n", "", kept=1)
    journal._saving.result()
    journal._saving = Future()  # the disk is not ready
    journal.commit(1, "b\n", "", kept=2)

    def full(file, content):
        if file.name == str(files[1]):
            raise OSError(errno.ENOSPC, "full", file.name)
        append(file, content)

    append = pipeline.append
    monkeypatch.setattr(pipeline, "append", full)
    with pytest.raises(OSError, match="full"):
        journal.commit(1, "c\n", "x\n", kept=3)
    journal._saving.set_result(None)
    journal.close(False)
    again = Journal(files[0], files, {})
    assert (again.done, again.kept, files[0].read_text()) == (2, 2, "a\nb\n")
    again.close(False)


def test_blocks_are_appended_while_the_disk_is_waited_for(tmp_path, monkeypatch):
    """What is not on the disk yet is not in the state; at the end all is."""
    ready, sync = threading.Event(), os.fsync

    def slow(number):
        assert ready.wait(60)
        sync(number)

    files = [tmp_path / "out.xyz"]
    journal = Journal(files[0], files, {})
    monkeypatch.setattr(os, "fsync", slow)
    for text in "abc":
        journal.commit(1, f"{text}\n", kept=text)
    assert files[0].read_text() == "a\nb\nc\n"
    assert '"records": 0' in (tmp_path / "out.xyz.progress").read_text()
    ready.set()
    journal.close(False)
    again = Journal(files[0], files, {})
    assert (again.done, again.kept) == (3, "c")
    again.close(False)


def test_a_disk_that_fails_later_is_told(tmp_path, monkeypatch):
    files = [tmp_path / "out.xyz"]
    journal = Journal(files[0], files, {})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        journal.commit(1, "a\n")
        with pytest.raises(OSError, match="No space left"):
            journal.close(True)
    again = Journal(files[0], files, {})
    assert again.done == 0 and files[0].read_text() == ""
    again.commit(1, "b\n")
    again.close(True)
    assert files[0].read_text() == "b\n" and [path.name for path in tmp_path.iterdir()] == ["out.xyz"]
