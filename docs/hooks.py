"""Links of the pages to files outside of docs/ become the file's name: the site holds docs/ alone."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.files")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace them; one whose file is not there is a warning, which `--strict` makes an error."""
    source = Path(page.file.abs_src_path).parent

    def name(link: re.Match[str]) -> str:
        if not (source / link["path"]).exists():
            log.warning("%s links to %s, which is not there", page.file.src_path, link["path"])
        text, file = link["text"], link["path"].removeprefix("../")
        return text if text.strip("`") == file else f"{text} (`{file}`)"

    return LINK.sub(name, markdown)
