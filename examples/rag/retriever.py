"""A retriever: SQLite's full-text index (FTS5, ranked by bm25) behind the Model Context Protocol, on stdio.

python retriever.py INDEX.sqlite          # serves the tool `search`; made by `write_index`
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path

RESULTS = 3


def write_index(passages: Iterable[str], path: Path, *, letters: str = "") -> Path:
    """Write a new index of passages; of equally good ones those given first are found first.

    Args:
        letters: what does not end a word, besides letters and digits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        words = f"unicode61 tokenchars '{letters}'" if letters else "unicode61"
        database.execute(f'CREATE VIRTUAL TABLE passages USING fts5(text, tokenize="{words}")')
        database.executemany("INSERT INTO passages VALUES (?)", ((text,) for text in passages))
    database.close()
    return path


def open_index(path: Path) -> sqlite3.Connection:
    """An index for reading; any number of processes may."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def find(index: sqlite3.Connection, query: str) -> list[str]:
    """The passages with any of a query's words, the best `RESULTS` of them first."""
    # Quoted, a word has none of FTS5's operators, which nobody means.
    words = [f'"{word}"' for word in query.replace('"', " ").split()]
    sql = "SELECT text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?"
    return [text for (text,) in index.execute(sql, (" OR ".join(words), RESULTS))] if words else []


def serve(path: Path) -> None:
    """Serve the tool on stdin and stdout until the client leaves."""
    from mcp.server.mcpserver import MCPServer

    server, index = MCPServer("retriever"), open_index(path)

    @server.tool(structured_output=False)
    async def search(query: str) -> str:
        """Find passages."""
        return "\n".join(find(index, query)) or "nothing found"

    server.run()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
