"""A plugin: the module that builds the agent is imported late, in a thread, and calls back into the program's agent."""

import importlib
import sys
import threading
from pathlib import Path

from openai import OpenAI

PLUGINS = Path(__file__).parent / "plugins"
answers: dict[str, str] = {}


def run(name: str, question: str) -> None:
    """Load a plugin, and ask it."""
    sys.path.insert(0, str(PLUGINS))
    plugin = importlib.import_module(name)
    answers[name] = plugin.answer(question)


client = OpenAI()
first = client.chat.completions.create(
    model="gpt-4.1-mini", messages=[{"role": "user", "content": "Which plugin knows the time of the tide?"}]
)
chosen = first.choices[0].message.content
worker = threading.Thread(target=run, args=(chosen, "When is high tide in Brest?"))
worker.start()
worker.join()
print(chosen, answers)
