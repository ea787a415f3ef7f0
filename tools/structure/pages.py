"""Checks that files and links on the project's pages exist, and that no page sends users to a package index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .sources import Finding, Project

FOLDERS = ("benchmarks", "deploy", "docs", "examples", "export", "integrations", "keras_ddl", "native", "notebooks")
FOLDERS = (*FOLDERS, "observe", "resilience", "serving", "tests", "tools")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
SOURCE = re.compile(r"[\w*/]+\.(?:cc|h)")  # the end of the path of a source in native/
OTHERS = {"mpi.h"}
NOT_LISTED = {"README.md", "part.toml", "py.typed", "conftest.py", "tests/", "docs/", "__pycache__/"}
SOURCES = {".py", ".cc", ".h", ".cmake"}
TOO_FEW = "the rule finds too few folder names in it: change the pattern"
# The bare name, which pip looks up in an index, but not the path of a wheel or of a checkout.
BY_NAME = re.compile(r"pip3? install\b[^\n`#]*?[ '\"]keras[_-]ddl(?![-\w./])")
TEXTS = (".md", ".py", ".ipynb", ".toml", ".yaml", ".yml", ".sbatch", "Makefile", "Dockerfile", "run")


def without_blocks(text: str) -> str:
    """Returns the text of a page with the lines of its code blocks emptied."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def in_backticks(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, word) for inline code on a page."""
    prose = without_blocks(text)
    for code in re.finditer(r"`([^`\n]+)`", prose):
        line = prose.count("\n", 0, code.start()) + 1
        yield from ((line, word) for word in code[1].split())


def has_sources(folder: Path) -> bool:
    return any(path.suffix in SOURCES for path in folder.rglob("*"))


def pages_name_existing_files(project: Project) -> Iterator[Finding]:
    """A path in backticks on a page exists; for native sources the end of the path suffices."""
    native = [path.relative_to(project.root) for path in project.tracked if "native" in path.parts]
    for page in (*project.pages, *project.beside):
        for line, word in in_backticks(project.text(page)):
            if (
                PATH.fullmatch(word)
                and not any(project.root.glob(word))
                and not project.is_in_missing_part(project.root / word)
            ):
                yield Finding(page, line, f"{word} does not exist")
            if SOURCE.fullmatch(word) and word not in OTHERS and not any(path.match(word) for path in native):
                yield Finding(page, line, f"{word} is no source of native/")


def readmes_list_the_files_of_their_folders(project: Project) -> Iterator[Finding]:
    """The README.md of a folder lists each module, native source and folder in it once; a header stands for its .cc."""
    readmes = [page for page in project.pages if page.name == "README.md" and page.parent != project.root]
    for page in readmes:
        lists = re.findall(r"^- (\[?`\S+`(?:, `\S+`)*)", project.text(page), re.MULTILINE)
        listed = [name for names in lists for name in re.findall(r"`(\S+?)`", names)]
        if len(listed) != len(set(listed)):
            yield Finding(page, 1, "lists a file twice")
        # A folder that has moved may leave a folder without sources behind.
        here = [path for path in page.parent.iterdir() if not path.is_dir() or has_sources(path)]
        beside = {f"{path.name}/" if path.is_dir() else path.name for path in here} - NOT_LISTED
        beside -= {f"{path.stem}.cc" for path in here if path.suffix == ".h"}
        beside = {
            name for name in beside if not name.endswith(".so") and not project.is_in_missing_part(page.parent / name)
        }
        listed = [name for name in listed if not project.is_in_missing_part(page.parent / name)]
        for name in sorted((set(listed) ^ beside) - {"__init__.py"}):
            yield Finding(page, 1, f"lists {name}, which does not exist" if name in listed else f"does not list {name}")


def picture_names_existing_folders(project: Project) -> Iterator[Finding]:
    """Every folder in docs/pictures/the_line.svg exists."""
    picture = project.root / "docs" / "pictures" / "the_line.svg"
    named = [(line, match[1]) for line, match in project.matches(picture, r'class="path"[^>]*>([^<]+)<')]
    if len(named) <= 10:
        yield Finding(picture, 1, TOO_FEW)
    for line, word in named:
        if not (project.root / word).is_dir():
            yield Finding(picture, line, f"{word} does not exist")


def anchors(text: str) -> set[str]:
    """Returns the headings of a page as links spell them: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def links_have_targets(project: Project) -> Iterator[Finding]:
    """A page's links lead to existing files and headings. (`make docs` does not check the README's.)"""
    for page in (*project.pages, *project.beside):
        for line, match in project.matches(page, r"\]\(([^)#]*)#?([^)]*)\)"):
            target, anchor = match.groups()
            if target.startswith(("http://", "https://")):
                continue
            there: Path = page.parent / target if target else page
            if project.is_in_missing_part(there):
                continue
            if not there.exists() or (anchor and anchor not in anchors(project.text(there))):
                yield Finding(page, line, f"the link {target}#{anchor} leads nowhere")


def no_text_installs_by_bare_name(project: Project) -> Iterator[Finding]:
    """No text says `pip install` with the project's bare name: no index has it, so others could register it there."""
    for path in project.tracked:
        if path.name.endswith(TEXTS) and "tests/unit/test_structure.py" not in path.as_posix():
            for line, match in project.matches(path, BY_NAME):
                yield Finding(path, line, f"{match[0]}: the project is in no index")


RULES = (
    pages_name_existing_files,
    readmes_list_the_files_of_their_folders,
    picture_names_existing_folders,
    links_have_targets,
    no_text_installs_by_bare_name,
)
