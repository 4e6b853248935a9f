"""AutoGen: agents, teams and tools become spans by hooks on its base classes."""

from agl.adapters.autogen.tracer import AutoGenTracer

wrap = AutoGenTracer.wrap
"""Make an AutoGen agent or team trainable; each rollout runs a fresh copy (model clients and tools are shared).

`agent` may also be a function, sync or async: one without arguments that builds a new agent for each rollout, or a
function task -> output that runs AutoGen itself (classic chats, agents of autogen-core). The name is the agent's, the
team's or the function's. The input of `run(task=...)` (ag2: `ask`) is the task's question. Scored is the content of the
last message of the `TaskResult` (ag2: `AgentReply`). An agent that cannot be copied is a ConfigError when a rollout
starts.
"""

__all__ = ["AutoGenTracer", "wrap"]
