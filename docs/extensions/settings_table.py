"""The Sphinx directive `settings`: shows the table of keras_ddl/config.py, which `keras-ddl info --all` also prints."""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from keras_ddl import config


class Settings(Directive):
    def run(self) -> list[nodes.Node]:
        rows = [("variable", "default", "what for"), ("---",) * 3, *map(self._row, config.VARIABLES.values())]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        parent = nodes.container()
        self.state.nested_parse(StringList(lines, source="keras_ddl/config.py"), self.content_offset, parent)
        return parent.children

    @staticmethod
    def _row(variable: config.Variable) -> tuple[str, str, str]:
        default = int(variable.default) if isinstance(variable.default, bool) else variable.default
        default = "" if default is None else f"`{default}`"
        return f"`{variable.environment_name}`", default, f"{variable.why} *({variable.type})*"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
