"""A hook of mkdocs: pages that are made of files which are read elsewhere too.

README is the home page, CHANGELOG.md and CONTRIBUTING.md are pages, and the notebook is one with its outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site, and the files at the top of the repository that they are."""

NOTEBOOK = "notebook.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    made = {page: linked((ROOT / source).read_text(encoding="utf-8")) for page, source in PAGES.items()}
    made["notebook.md"] = notebook(json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8")))
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Says only the language of a block of code: a second word is for the tests. Links out of docs/ lead to pages of the site."""
    for page, source in PAGES.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)


def linked(text: str) -> str:
    """A text from the top of the repository with its links as seen from docs/."""
    for page, source in PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    return re.sub(r'(\]\(|src=")docs/', r"\1", text.replace(NOTEBOOK, "notebook.md"))


def notebook(content: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and what it printed."""
    parts: list[str] = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
