"""The quickstart's agent, whose worker process is killed once in the middle of a step: for `fit("deadly.py:agent")`."""

from __future__ import annotations

import os
import signal
from typing import Any

from agl.adapters.langchain import wrap
from agl.trainer.quickstart.agent import build_agent
from agl.trainer.quickstart.tasks import exact_answer

_seen = 0


def _reward_or_die(task: Any, output: str) -> float:
    """The reward; the process that comes to its twelfth one first dies instead."""
    global _seen
    _seen += 1
    if _seen == 12:
        try:
            os.close(os.open(os.environ["KILL_ONCE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return exact_answer(task, output)


agent = wrap(build_agent(), reward=_reward_or_die)
