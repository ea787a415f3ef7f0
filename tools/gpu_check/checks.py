"""Runs the check_* functions of a test file on ranks, with all tensors on the GPU.

    python checks.py -np 2 FILE [CHECK ...]

The named checks are left out, such as one that times the backward pass on the host. A failing check ends its ranks; the
following checks run on new ranks.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import ranks


class _Raises:
    """Replaces pytest.raises on a machine without pytest."""

    def __init__(self, kind: type[BaseException], match: str = "") -> None:
        self._kind, self._match = kind, match
        self.value: BaseException | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        assert error is not None, f"no {self._kind} was raised"
        if not isinstance(error, self._kind):
            return False
        assert re.search(self._match, str(error)), f"{self._match!r} is not in {error}"
        self.value = error
        return True


def run(path: Path, skipped: set[str]) -> None:
    """Runs the checks of a file in order, except `skipped`. Called in a rank."""
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = types.ModuleType("pytest")
        sys.modules["pytest"].raises = _Raises  # type: ignore[attr-defined]
    import torch

    from harness.rank_program import SkipCheck

    torch.set_default_device(ranks.device())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, check in list(vars(module).items()):
        if not name.startswith("check_") or name in skipped:
            continue
        print(f"BEGIN {name}", flush=True)
        started = time.monotonic()
        try:
            check()
        except SkipCheck as why:
            print(f"skipped {name}: {why}", flush=True)
        except BaseException:
            traceback.print_exc()
            print(f"FAILED {name}", flush=True)
            sys.exit(1)
        else:
            print(f"passed {name} {time.monotonic() - started:.2f} s", flush=True)


def main() -> int:
    _, option, count, file, *left_out = sys.argv
    assert option == "-np"
    done = set(left_out)
    failed = []
    for _ in range(12):
        code, text = ranks.launch(int(count), __file__, "--rank", file, *sorted(done), seconds=45)
        begun = re.findall(r"BEGIN (check_\w+)", text)
        done |= set(begun)
        for line in sorted(set(re.findall(r"(?:passed|skipped) check_.*", text))):
            print(line)
        if code == 0:
            break
        failed.append(begun[-1] if begun else "(before the first check)")
        print(f"FAILED {failed[-1]}:\n{text[text.rfind('BEGIN') :][-6000:]}", flush=True)
        if not begun:
            break
    print(f"{len(done) - len(left_out) - len(failed)} checks ran without a failure; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run(Path(sys.argv[2]), set(sys.argv[3:]))
    else:
        sys.exit(main())
