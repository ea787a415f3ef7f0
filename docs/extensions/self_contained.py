"""Warns of pages that load something from elsewhere: the site is to be read without a network."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

_LOADED = re.compile(r'<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"')
_IMPORTED = re.compile(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")]+)")


def check(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for pattern, suffix in ((_LOADED, "html"), (_IMPORTED, "css")):
        for page in sorted(Path(app.outdir).rglob(f"*.{suffix}")):
            for address in pattern.findall(page.read_text(encoding="utf-8")):
                logging.getLogger(__name__).warning("%s loads %s", page.relative_to(app.outdir), address)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
