"""keras-ddl trace view, in a real browser if one is installed (Debian: chromium)."""

import html
import re
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from harness.made_timelines import Job
from keras_ddl.cli.main import group

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    path = Job(steps=1500, noise=0.2, between=5e-3, per_epoch=500).write(folder / "a <!--<script> job.json")
    target = folder / "page.html"
    done = CliRunner().invoke(group, ["trace", "view", str(path), "-o", str(target)])
    assert done.exit_code == 0 and str(target) in done.output, done.output
    return target


def opened(page, address="", *, probe=""):
    """Returns the page's elements as text, after its scripts and `probe` have run."""
    watched = page.with_name("watched.html")
    text = page.read_text(encoding="utf-8")
    script = "<script>onerror = (...text) => { document.title = 'ERROR ' + text; };</script>"
    text = text.replace("<head>", f"<head>{script}")
    text = text.replace("</body>", f"<pre id='probed'></pre><script>{probe}</script></body>")
    watched.write_text(text, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom"]
    command += [
        "--virtual-time-budget=3000",
        f"--user-data-dir={page.parent / 'profile'}",
        f"file://{watched}{address}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "<title>Steps by rank" in done.stdout, done.stdout[:2000]
    return html.unescape(re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL))


def test_page_is_one_self_contained_file(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?:|fetch\(", text)
    assert "a \\u003c!--\\u003cscript> job.json" in text, "a file name must not start a script"
    assert len(text) < 10_000_000


@needs_browser
def test_page_shows_sentences_bars_and_the_color_of_each_part(page):
    # Counts the canvas pixels of each part's color, because nothing else shows what was drawn.
    probe = """
    const pen = $("steps").getContext("2d"), seen = {};
    const pixels = pen.getImageData(0, 0, pen.canvas.width, pen.canvas.height).data;
    for (let i = 0; i < pixels.length; i += 4) {
      const name = "#" + [0, 1, 2].map(k => pixels[i + k].toString(16).padStart(2, "0")).join("");
      seen[name] = (seen[name] || 0) + 1;
    }
    $("probed").textContent = JSON.stringify(PARTS.map(([part]) => seen[colour(part)] || 0));
    """
    shown = opened(page, probe=probe)
    assert "Rank 3 (h) was last in" in shown and re.search(r"its input took 1\d ms more", shown)
    assert "all 1500 steps" in shown
    counts = [int(count) for count in re.search(r'id="probed">\[(.*?)\]', shown)[1].split(",")]
    assert all(count > 300 for count in counts), counts
    assert re.search(r'<tr class="late"><td>3</td>', shown)


@needs_browser
def test_page_opens_at_a_step_and_shows_tooltips(page):
    probe = """
    setTimeout(() => {
      const before = $("range").textContent, at = boxes.find(box => box.tell().includes("sum_3"));
      const place = $("steps").getBoundingClientRect();
      const point = {clientX: place.x + (at.x + at.to) / 2, clientY: place.y + (at.y + at.end) / 2, bubbles: true};
      $("steps").dispatchEvent(new PointerEvent("pointermove", point));
      $("steps").dispatchEvent(new WheelEvent("wheel", {...point, deltaY: -1500, cancelable: true}));
      draw();  // immediately, because a browser without a screen delays drawing
      $("probed").textContent = before + " | " + $("range").textContent;
    }, 300);
    """
    shown = opened(page, "#step=700", probe=probe)
    far, near = re.search(r'id="probed">(.*?) \| (.*?)</pre>', shown).groups()
    assert re.fullmatch(r"steps (?:69|70)\d to 70\d of 1500, \d\d ms", far), far
    assert near.startswith(("step ", "steps ")) and near != far
    tip = re.search(r'id="tip".*?>(.*?)</div>', shown, re.DOTALL)[1]
    assert re.search(r"3f9a0c21/sum_3\n1 MB on rank \d\nready after \d\d ms of the step", tip), tip
