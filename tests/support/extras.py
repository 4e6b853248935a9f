"""The table of docs/adapters.md of what the adapters' extras ask for."""

from __future__ import annotations

import tomllib

from paths import ROOT


def requirements() -> str:
    """What the adapters' extras ask for, as Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # AutoGen's adapter has three families, each with a distribution.
    extras = {name.replace("_", "-") for name in project["entry-points"]["agl.adapters"]} | {"ag2", "autogen-classic"}
    lines = [
        f"| `pip install '.[local,{extra}]'` | {', '.join(f'`{need}`' for need in needs)} |"
        for extra, needs in project["optional-dependencies"].items()
        if extra in extras
    ]
    return "\n".join(["| | asks for |", "|---|---|", *lines])
