"""Draws boxes and text for the pictures of docs/, in colours that are readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

STYLE = """
  .page { fill: #ffffff } .frame { fill: none; stroke: #6e7781 }
  .memory { fill: #6e7781; fill-opacity: 0.18; stroke: #6e7781 }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px } .bold { font-weight: 600 }
  .on { fill: #ffffff } .ring { fill: none; stroke-width: 2.5 } .way { fill: none; stroke: #6e7781; stroke-width: 2 }
  .path { font: 10.5px ui-monospace, monospace } .tip { fill: #6e7781 }
  @media (prefers-color-scheme: dark) { .page { fill: #0d1117 } text { fill: #e6edf3 } .on { fill: #ffffff } }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}" {more}/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join([rectangle(0, 0, width, height, "page"), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
        f'viewBox="0 0 {width} {height}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def write(script: str, drawn: str) -> None:
    """Writes the picture next to the script that draws it."""
    Path(script).with_suffix(".svg").write_text(drawn, encoding="utf-8")
