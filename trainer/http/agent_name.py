"""`{name:agent}` in a route: an agent's name, which may be any text, with slashes and line breaks.

Starlette's `path` has no line breaks, which names from folded YAML often end with.
"""

from __future__ import annotations

from starlette.convertors import PathConvertor, register_url_convertor


class AgentName(PathConvertor):
    """An agent's name, as it is once the URL is unquoted."""

    regex = "(?s:.*)"


register_url_convertor("agent", AgentName())
