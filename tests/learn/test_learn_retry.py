"""A round of which no frame was labelled is tried again when the run is resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ase.io import read

from torchmdnet2.errors import BadData
from torchmdnet2.learn import parse_learn_config, run_learning

FRAIL = """
import sys
from pathlib import Path
if not Path({licence!r}).exists():
    sys.exit("no licence")
number, _, *atoms = Path(sys.argv[1]).read_text().splitlines()
head = 'Properties=species:S:1:pos:R:3:forces:R:3 energy=0.0 pbc="F F F"'
rows = [" ".join(atom.split()[:4]) + " 0 0 0" for atom in atoms]
Path(sys.argv[2]).write_text("\\n".join([number, head, *rows, ""]))
"""


def test_a_round_without_any_label_is_tried_again(raw_learn, tmp_path):
    """A labeller that does not work while a file is missing, as a licence server that is down."""
    program, licence = tmp_path / "label.py", tmp_path / "licence"
    program.write_text(FRAIL.format(licence=str(licence)))
    labeller = {"name": "command", "command": [sys.executable, str(program), "{input}", "{output}"],
                "level_of_theory": "Morse"}  # fmt: skip
    raw_learn["labels"] |= {"labeller": labeller, "budget": 3}
    raw_learn["start"]["verify"] = 0
    raw_learn["stop"]["spread"] = 1e-9  # so that the first round is followed by labels
    for _ in range(2):
        with pytest.raises(BadData, match=r"none of 3 frames .*: no licence\. .*--resume auto tries all of them again"):
            run_learning(parse_learn_config(raw_learn), resume="auto")
    licence.touch()
    result = run_learning(parse_learn_config(raw_learn), resume="auto")
    assert result.rounds[-1].asked == 3 and result.rounds[-1].failed == 0
    own = Path(raw_learn["output"]["folder"]) / "round_001"
    assert len(read(own / "labelled.xyz", ":")) == 3
    assert all("no licence" in row for row in (own / "failed.jsonl").read_text().splitlines())
