"""python -m minigrad.study.exercises [FOLDER] [--solved] [--list]: write the exercises; what is there already stays."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from minigrad.study.exercises.table import EXERCISES

PROBLEMS = Path(__file__).parent / "problems"
_ANSWER = re.compile(r"^    # \[yours\]\n(.*?)^    # \[end\]\n", re.M | re.S)
_BLANK = '    raise NotImplementedError                            # replace this line by your rule\n'

CONFTEST = '''"""So that `pytest` in this folder grades the exercises. Nothing to write here."""

from minigrad.study.exercises.plugin import (  # noqa: F401
    pytest_collect_file,
    pytest_pycollect_makemodule,
    pytest_terminal_summary,
)
'''

README = '''Exercises in backward rules
===========================

Begin with 01_add.py: it says what a rule is and how one is derived. Each file states a function, what its rule must
return, and ends in a hint; replace the line `raise NotImplementedError` by your rule. They are plain NumPy functions.

    pytest                    grade everything here
    pytest 03_matmul.py       grade one

The grader says in words what is wrong with an answer; what is not written yet is only named as such. Exercises 6, 7, 9,
10 and 12 follow the equations (A.10.2) and (A.10.5) to (A.10.9) of attention. The same ground as prose, with minigrad's
engine: examples/guide in minigrad's repository.
'''


def text_of(name: str, solved: bool) -> str:
    """The file of an exercise, with its rule or with a blank in its place."""
    text = (PROBLEMS / f"{name}.py").read_text(encoding="utf-8")
    return _ANSWER.sub(lambda found: found[1] if solved else _BLANK, text)


def write(folder: Path, solved: bool = False) -> tuple[list[str], list[str]]:
    """Write the files that are not there; (names written, names left alone)."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"[exercises] FOLDER is a folder: {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"conftest.py": CONFTEST, "README.txt": README}
    files |= {f"{exercise.name}.py": text_of(exercise.name, solved) for exercise in EXERCISES}
    written, kept = [], []
    for name, text in files.items():
        try:
            with open(folder / name, "x", encoding="utf-8") as file:     # x: never over what is there
                file.write(text)
            written.append(name)
        except FileExistsError:
            kept.append(name)
    return written, kept


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minigrad.study.exercises", description=__doc__)
    parser.add_argument("folder", nargs="?", default="exercises", type=Path, metavar="FOLDER",
                        help="where to write them (default: exercises)")
    parser.add_argument("--solved", action="store_true", help="write the solved set")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    given = parser.parse_args(argv)
    if given.list:
        for exercise in EXERCISES:
            title = (PROBLEMS / f"{exercise.name}.py").read_text(encoding="utf-8").splitlines()[0].partition(": ")[2]
            print(f"{exercise.name:20}{title}")
        return 0
    try:
        written, kept = write(given.folder, given.solved)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    if written:
        print(f"wrote {len(written)} files to {given.folder}: {', '.join(written)}")
    if kept:
        print(f"left alone, being there already: {', '.join(kept)}")
    print(f"begin with {given.folder / EXERCISES[0].name}.py; grade with: pytest {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
