"""Links of the pages to files outside of docs/ become the file's name: the site holds docs/ alone.

For assistants, the site also has each page as Markdown, `llms.txt`, which lists them (llmstxt.org), and
`llms-full.txt`, which is most of them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(#[^)]*)?\)")
DOCS = Path(__file__).parent
log = logging.getLogger("mkdocs.hooks.files")
TITLE = re.compile(
    r"^# (?P<title>.+)\n(?:\n|<!--.*\n)*(?P<first>[\w`](?!``)(?:(?!\n\n|[.?:]\s)[\s\S])*[.?:](?=\s|$))?", re.MULTILINE
)
"""A page's title, and the first sentence below it where it begins with one."""
NOT_FOR_ASSISTANTS = ("decisions/", "benchmarks.md", "api/")
pages: dict[str, str] = {}
"""Path below docs/ -> Markdown, in the order of the navigation."""


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

    pages[page.file.src_path] = LINK.sub(name, markdown)
    return pages[page.file.src_path]


def on_nav(nav: Any, **_: Any) -> None:
    pages.clear()
    pages.update({page.file.src_path: "" for page in nav.pages})


def on_post_build(config: Any, **_: Any) -> None:
    """Write the pages as Markdown, `llms.txt` and `llms-full.txt`."""
    site, lines = Path(config["site_dir"]), [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for path, text in pages.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
        found = TITLE.search(text)
        if found is None:
            log.warning("%s has no title", path)
            continue
        first = " ".join(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", found["first"] or "").split())
        lines.append(f"- [{found['title']}]({path}){first and f': {first}'}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    chosen = [text for path, text in pages.items() if not path.startswith(NOT_FOR_ASSISTANTS)]
    (site / "llms-full.txt").write_text("\n\n".join(chosen), encoding="utf-8")
