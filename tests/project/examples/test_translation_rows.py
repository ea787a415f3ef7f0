"""How the studies of examples/translation print and store their rows."""

import argparse
import json

import pytest
from examples.translation_parts import rows

FOUND = [
    {"ranks": 1, "bytes": 1234567, "step ms": 2.5, "how": "measured"},
    {"ranks": 64, "bytes": 11.4e9, "how": "published", "where": "a paper"},
]


def draw(figure, found):
    axes = figure.subplots()
    for how, look in rows.LOOKS.items():
        axes.plot(*zip(*[(row["ranks"], row["bytes"]) for row in found if row["how"] == how] or [(0, 0)]), **look)


def chosen(*arguments):
    parser = argparse.ArgumentParser(parents=[rows.options("study")])
    return rows.parse(parser, [str(each) for each in arguments])


def test_rows_are_printed_written_and_drawn(tmp_path, capsys):
    for ending, first in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        both = tmp_path / "rows.json", tmp_path / f"rows.{ending}"
        pictures = []
        for _ in range(2):
            rows.show(FOUND, chosen("--json", both[0], "--plot", both[1]), draw)
            pictures.append(both[1].read_bytes())
        assert pictures[0] == pictures[1] and pictures[0].startswith(first)
        assert json.loads(both[0].read_text()) == FOUND
    lines = capsys.readouterr().out.splitlines()[:4]
    assert lines == [
        "ranks           bytes  step ms  how        where",
        "    1       1,234,567      2.5  measured",
        "   64  11,400,000,000           published  a paper",
        f"picture: {tmp_path / 'rows.svg'}",
    ]


def test_rows_record_how_they_were_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert str(chosen().plot) == "study.svg" and chosen("--no-plot").plot is None
    with pytest.raises(ValueError, match="must say one of measured, emulated"):
        rows.show([{"ranks": 1, "how": "guessed"}], chosen("--no-plot"), draw)
    with pytest.raises(SystemExit):
        chosen("--plot", "study.gif")
    assert "must end in .svg, .png or .pdf. Received: study.gif" in capsys.readouterr().err
