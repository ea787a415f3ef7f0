"""How `make docs` makes one site of docs/ and the docstrings. Every warning is an error there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "keras_ddl"
author = "the authors of keras_ddl"
extensions = [
    "myst_parser",  # the pages are Markdown, as the repository's own view wants them
    "sphinx.ext.autodoc",
    "sphinx_click",
    "command_examples",
    "docstrings",
    "every_name",
    "self_contained",
    "settings_table",
]
exclude_patterns = ["extensions"]

# Links to headings are checked, down to this level.
myst_heading_anchors = 3
# Text fences are not code: no colours, and no complaint that they cannot be read as Python.
highlight_language = "text"
# Quotes in the text are those of Python, and [...] is a shape.
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# Names of keras_ddl in docstrings must exist; types in signatures are others' names too, which no page shows.
nitpicky = True
nitpick_ignore_regex = [("py:(class|data|attr|func|meth)", ".*"), ("py:obj", r"(?!keras_ddl\.).*")]

html_theme = "furo"
html_title = "keras_ddl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
