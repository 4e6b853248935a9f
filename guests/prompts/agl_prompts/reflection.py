"""Asks another model for better texts, and writes down each reply: a resumed search asks nothing twice.

Invariant: only a text that its component allows is returned; a rejected text is counted, and the model gets the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from agl import tracing
from agl.agents.resources import LLM
from agl.errors import CheckpointError, ConfigError, EngineError
from agl.extras import require
from agl.trainer.run.checkpoints import require_same, write_atomically
from agl_prompts.components import Component

ASKS = 3
"""How often the model may try to write a text that is allowed."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)

Ask = Callable[[str], Awaitable[Any]]
"""Prompt -> reply."""


class Reflections:
    """The replies of one search.

    Args:
        path: the file that keeps them, a JSON object per line.
        settings: of the search; a resumed one has the same.
        resume: whether to continue the file if it exists.

    Attributes:
        asked: how many replies the models gave in this process.
        rejected: why a text was rejected -> how often.

    Raises:
        CheckpointError: the file was written with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.asked = 0
        self.rejected: Counter[str] = Counter()
        self._replies: dict[tuple[str, str], Any] = {}
        entries = []
        for line in path.read_text().splitlines() if resume and path.is_file() else ():
            with contextlib.suppress(ValueError):  # The last line may have been cut off.
                entries.append(json.loads(line))
        if entries:
            if not isinstance(entries[0].get("settings"), dict):
                raise CheckpointError("this is not the record of a prompt search", hint="delete it", path=path)
            require_same(entries[0]["settings"], settings, path)
            self._replies = {(e["key"], e["prompt"]): e["reply"] for e in entries[1:]}
        write_atomically(path, "".join(f"{json.dumps(e)}\n" for e in entries or [{"settings": dict(settings)}]))

    async def reply(self, key: str, prompt: str, ask: Ask) -> Any:
        """The reply to a prompt, which is asked for unless it is in the file. `key` tells equal prompts apart."""
        if (key, prompt) in self._replies:
            return self._replies[key, prompt]
        with tracing.untrained("reflection"):
            reply = await ask(prompt)
        reply = reply if isinstance(reply, str) else None
        self.asked += 1
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "prompt": prompt, "reply": reply}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._replies[key, prompt] = reply
        return reply

    async def text(self, key: str, prompt: str, ask: Ask, component: Component, current: str) -> str | None:
        """A new text for a component, to replace `current`; None if none of `ASKS` replies has one."""
        question = prompt
        for i in range(ASKS):
            text = extract(await self.reply(f"{key}/{i}", question, ask))
            refusal = component.refusal(text) or ("it is the same text" if text.strip() == current.strip() else None)
            if refusal is None:
                return text
            self.rejected[f"{component.name}: {refusal}"] += 1
            question = f"{prompt}\n\nThe text in your last reply was rejected: {refusal}. Reply with another one."
        return None


def field_rule(component: Component) -> str:
    """The rule about a component's fields, for the model that rewrites it."""
    if not component.fields:
        return ""
    fields = ", ".join(f"{{{field}}}" for field in sorted(component.fields))
    return (
        f"\n\nThe text is a template. Keep each of these fields, exactly as written, at least once: {fields}. The "
        "program puts its values in their place. Add no other field, and write any other brace twice, as {{ or }}."
    )


def extract(reply: Any) -> str:
    """The text in a reply: what is within ``` lines, or all of it."""
    if not isinstance(reply, str):
        return ""
    block = _BLOCK.search(reply)
    return (block.group(1) if block else reply).strip()


def asker(reflection: LLM | Callable[[str], Any]) -> Ask:
    """Asks a model at an endpoint, or a function, sync or async.

    Raises:
        ConfigError: `reflection` is neither, or has no key.
    """
    if isinstance(reflection, LLM):
        require("reflection=agl.LLM(...)", "openai")
        import openai

        key = reflection.api_key or os.environ.get("OPENAI_API_KEY") or "not-used"

        async def ask_endpoint(prompt: str) -> Any:
            async with openai.AsyncOpenAI(base_url=reflection.endpoint, api_key=key, max_retries=4) as client:
                return await chat(client, reflection.model, prompt, **reflection.sampling_parameters)

        return ask_endpoint
    if not callable(reflection):
        raise ConfigError(
            f"reflection= is {reflection!r}",
            hint='the model that rewrites prompts, agl.LLM("https://api.openai.com/v1", "gpt-5"), or a function of a '
            "text",
        )

    async def ask(prompt: str) -> Any:
        if inspect.iscoroutinefunction(reflection):
            return await reflection(prompt)
        reply = await asyncio.to_thread(reflection, prompt)
        return await reply if inspect.isawaitable(reply) else reply

    return ask


async def chat(client: Any, model: str, prompt: str, **options: Any) -> Any:
    """A model's reply through an openai client.

    Raises:
        EngineError: the request failed, after the client's own retries.
    """
    import openai

    try:
        response = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], **options
        )
    except openai.OpenAIError as error:
        raise EngineError(
            f"the model {model!r} that rewrites prompts failed: {type(error).__name__}: {error}",
            hint="resume=True / --resume continues the search",
            url=getattr(client, "base_url", None),
        ) from error
    return response.choices[0].message.content if response.choices else None
