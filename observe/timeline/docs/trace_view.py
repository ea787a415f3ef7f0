"""Draws the output of `keras-ddl trace view` for a made-up job: `python observe/timeline/docs/trace_view.py`.

It needs Chromium, so the picture is committed and not drawn again with the pages.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from harness.made_timelines import Job  # noqa: E402
from keras_ddl.timeline import page, steps  # noqa: E402


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    job = Job(ranks=4, steps=300, noise=0.6, per_epoch=100, buckets=5, wire=2.5e-3, input=2e-3, slow_input=11e-3)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.html")
        page.write(file, steps.read(job.write(Path(folder, "step.json"))), title="step.json")
        size = "--window-size=1200,940"
        quietly = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        picture = Path(__file__).with_suffix(".png")
        subprocess.run([browser, *quietly, f"--screenshot={picture}", f"file://{file}#step=42"], check=True, timeout=60)


if __name__ == "__main__":
    main()
