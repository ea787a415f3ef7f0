"""Configures Sphinx, which builds one site from docs/ and the docstrings (`make docs`). Every warning is an error."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "extensions"))
from missing_parts import FOLDERS  # noqa: E402

project = "keras_ddl"
author = "the authors of keras_ddl"
extensions = [
    "myst_parser",  # the pages are Markdown, so that they can also be read in the repository
    "sphinx.ext.autodoc",
    "sphinx_click",
    "command_examples",
    "docstrings",
    "every_name",
    "missing_parts",
    "self_contained",
    "settings_table",
]
# The source directory is the whole repository, so that links work both in a checkout and on the site. Sphinx reads
# docs/, the docs/ of each part, the README of each code folder, and the figures beside the benchmarks and tests.
root_doc = "docs/index"
FIRST = {folder.partition("/")[0] for folder in FOLDERS}
include_patterns = ["docs/**.md", *(f"{folder}/docs/**.md" for folder in FOLDERS)]
include_patterns += [f"{folder}/**README.md" for folder in ("keras_ddl", "examples", *sorted(FIRST))]
include_patterns += ["benchmarks/results/*.md", "tests/launch/failures.md"]
READ = FIRST | {"benchmarks", "docs", "examples", "keras_ddl", "tests"}
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in READ]
exclude_patterns += ["docs/extensions", "**/tests", "**/__pycache__"]

# A glob is empty if every part of integrations/ or observe/ is missing.
suppress_warnings = ["toc.empty_glob"]

# Links to headings are checked down to this level.
myst_heading_anchors = 3
# Text fences are not code: they get no colours, and no warning that they are not valid Python.
highlight_language = "text"
# Quotes in the text are Python's.
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# Names of keras_ddl in docstrings must exist. Signatures also name types of other projects, which no page shows.
nitpicky = True
nitpick_ignore_regex = [("py:(class|data|attr|func|meth)", ".*"), ("py:obj", r"(?!keras_ddl\.).*")]

html_theme = "furo"
html_title = "keras_ddl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
