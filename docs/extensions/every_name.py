"""Warns of public names that no page of the API reference shows, so that the strict build fails."""

from __future__ import annotations

import importlib
from types import ModuleType

from missing_parts import is_missing
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

MODULES = ("keras_ddl", "keras_ddl.callbacks", "keras_ddl.errors", "keras_ddl.export", "keras_ddl.ops")
MODULES += ("keras_ddl.horovod", "keras_ddl.schedules", "keras_ddl.timeline", "keras_ddl.topology")


def public_names(module: ModuleType) -> list[str]:
    """Returns `__all__` without modules, because modules have their own pages."""
    names = [name for name in module.__all__ if name != "__version__" and not is_missing(f"{module.__name__}.{name}")]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    shown = env.get_domain("py").objects
    for module in MODULES:
        if is_missing(module):
            continue
        for name in public_names(importlib.import_module(module)):
            # The page of keras_ddl shows names that keras_ddl also exports.
            if f"{module}.{name}" not in shown and f"keras_ddl.{name}" not in shown:
                logging.getLogger(__name__).warning("%s.%s is public, but no page of the API shows it", module, name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
