"""Whether a benchmark notices that its machine is busy, with made-up times."""

import os
from pathlib import Path

import pytest

from keras_ddl.bench import machine_load
from keras_ddl.bench.machine_load import Load, Watch

TICKS = os.sysconf("SC_CLK_TCK")


def write(stat: Path, *, user=0.0, nice=0.0, system=0.0, idle=0.0, iowait=0.0, irq=0.0, softirq=0.0, steal=0.0):
    fields = (user, nice, system, idle, iowait, irq, softirq, steal, 50.0, 50.0)
    stat.write_text("cpu  " + " ".join(str(round(each * TICKS)) for each in fields) + "\ncpu0 1 2 3\n")


def test_load_is_the_time_that_others_used(tmp_path):
    stat = tmp_path / "stat"
    write(stat, user=100, system=10, idle=900, steal=5)
    watch = Watch(stat)
    write(stat, user=103, nice=1, system=10.5, idle=999, iowait=7, irq=0.25, softirq=0.25, steal=6)
    load = watch.load(2.0)
    assert load.others == pytest.approx(3 + 1 + 0.5 + 0.5 - 2)
    assert load.stolen == pytest.approx(1)
    assert watch.load(50.0).others == 0


@pytest.mark.parametrize("content", ["", "cpu 1 2\n", "nonsense\n", None])
def test_host_without_data_counts_as_quiet(content, tmp_path):
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert Watch(tmp_path / "stat").load(0.0).warning("now") == ""


@pytest.mark.parametrize(
    ("others", "stolen", "words"),
    [
        (1.9, 0.3, []),
        (2.1, 0.3, ["other programs took 0.2 of its 2 cores (now; /proc/stat)"]),
        (15.0, 5.0, ["1.5 of its 2 cores and other virtual machines took 25% of its time (steal)"]),
        (0.0, 0.5, ["busy: other virtual machines took 2% of its time"]),
    ],
)
def test_busy_machine_gives_a_warning_with_its_source(others, stolen, words):
    warning = Load(10.0, 2, others, stolen).warning("now")
    assert bool(warning) == bool(words)
    assert all(word in warning for word in words), warning


def test_sample_before_the_ranks_excludes_the_command_itself(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    write(stat, user=10)
    monkeypatch.setattr(machine_load, "Watch", lambda: Watch(stat))
    seconds = iter([1.0, 1.0 + 0.5 * (os.cpu_count() or 1)])
    monkeypatch.setattr(machine_load, "own_seconds", lambda: next(seconds))
    monkeypatch.setattr(machine_load.time, "sleep", lambda _: write(stat, user=10 + 0.5 * (os.cpu_count() or 1)))
    assert machine_load.before() == ""
