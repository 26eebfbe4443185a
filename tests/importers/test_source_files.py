"""Files of other programs that are damaged or hold what a model has no need of: each is refused with its reason."""

from __future__ import annotations

import struct
import zipfile

import pytest
import torch

from torchmdnet2.core.source_files import read_tensor_file, read_torchscript
from torchmdnet2.errors import BadCheckpoint


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def numbers(kind: str = "FloatStorage", size: int = 4, word: str = "storage") -> bytes:
    """Four float32 numbers, with what the instructions say of them."""
    return b"(" + text(word) + b"ctorch\n" + kind.encode() + b"\n" + text("0") + text("cpu") + bytes([75, size]) + b"tQ"


def tensor(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """A module whose attribute `x` is a tensor."""
    sizes = [b"(" + b"".join(b"J" + struct.pack("<i", n) for n in values) + b"t" for values in (shape, stride)]
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + numbers() + bytes([75, offset]) + sizes[0] + sizes[1] + b"tR"
    return b"c__torch__.m\nM\n)\x81}(" + text("x") + made + b"ub."


def script(path, instructions: bytes, *without: str) -> str:
    parts = {
        "m/data.pkl": b"\x80\x02" + instructions,
        "m/constants.pkl": b"",
        "m/data/0": struct.pack("<4f", *range(4)),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name in parts.keys() - set(without):
            archive.writestr(name, parts[name])
    return str(path)


def test_the_instructions_written_here_are_read(tmp_path):
    """Without a fault: so that each case below is refused for the fault planted in it."""
    found = read_torchscript(script(tmp_path / "m.jpt", tensor(1, (3,), (1,))))
    assert found.kind == "M" and found["x"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        (b"}.", "not a TorchScript file of a module"),
        (b"}", "damaged, or not a TorchScript file"),
        (b"cos\nsystem\n)\x81.", "it makes an object that is not a module: .*os system"),
        (b"c__torch__.m\nM\n}\x81.", "it makes an object that is not a module"),
        (b"}}b.", "it sets attributes of an object that is not a module"),
        (b"c__torch__.m\nM\n)\x81)b.", "it sets attributes of an object that is not a module"),
        (b"cos\nsystem\n)R.", "it calls os system, which TorchScript files of models do not need"),
        (b"I1\n.", "it has the instruction INT, which TorchScript files do not use"),
        (numbers("ComplexFloatStorage") + b".", "numbers of an unknown type: .*ComplexFloatStorage"),
        (numbers(word="module") + b".", "numbers of an unknown type"),
        (numbers(size=5) + b".", "the file 0 of .* does not have the stated type and size"),
        (numbers("DoubleStorage") + b".", "the file 0 of .* does not have the stated type and size"),
        (tensor(0, (2, 2), (1,)), "the shape of a tensor is not valid"),
        (tensor(0, (2,), (-1,)), "the shape of a tensor is not valid"),
        (tensor(2, (3,), (1,)), "a tensor has more numbers than the file"),
        (tensor(0, (5,), (0,)), "a tensor has more numbers than the file"),
    ],
)
def test_instructions_that_no_model_needs_are_refused(instructions, words, tmp_path):
    with pytest.raises(BadCheckpoint, match=rf"m\.jpt: .*{words}"):
        read_torchscript(script(tmp_path / "m.jpt", instructions))


def test_archives_of_something_else_are_refused(tmp_path):
    for missing in ("m/data.pkl", "m/constants.pkl"):
        with pytest.raises(BadCheckpoint, match=r"not a TorchScript file$"):
            read_torchscript(script(tmp_path / "m.jpt", tensor(0, (1,), (1,)), missing))
    with pytest.raises(BadCheckpoint, match="damaged, or not a TorchScript file"):
        read_torchscript(script(tmp_path / "m.jpt", tensor(0, (1,), (1,)), "m/data/0"))
    (tmp_path / "m.jpt").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match="not a TorchScript file, or damaged: "):
        read_torchscript(tmp_path / "m.jpt")


def test_what_is_wrong_with_a_file_of_tensors(tmp_path):
    torch.save({"x": torch.ones(100)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for content, words in (
        (b"", "the file is empty"),
        (b"text", "PyTorch did not write this file"),
        (whole[: len(whole) // 2], "it is damaged, cut short, or holds more than"),
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(BadCheckpoint, match=words):
            read_tensor_file(tmp_path / "bad")
