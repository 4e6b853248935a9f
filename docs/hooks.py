"""Links of the pages to files outside of docs/ become the file's name: the site holds docs/ alone."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(#[^)]*)?\)")
DOCS = Path(__file__).parent
log = logging.getLogger("mkdocs.hooks.files")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace them; one whose file is not there is a warning, which `--strict` makes an error."""
    source = Path(page.file.abs_src_path).parent

    def name(link: re.Match[str]) -> str:
        target = (source / link["path"]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_path, link["path"])
        text, file = link["text"], target.relative_to(DOCS.parent).as_posix() if target.exists() else link["path"]
        return text if text.strip("`") == file else f"{text} (`{file}`)"

    return LINK.sub(name, markdown)
