"""Attribute names: OpenTelemetry GenAI semantic conventions, and `agl.*` for what they do not cover.

Source: OpenTelemetry semantic conventions for generative AI (status: development), spans `invoke_agent`, `chat`,
`execute_tool`.
"""

from typing import Final

OPERATION_NAME: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"
EVALUATION: Final = "gen_ai.evaluation.result"
"""The event on a reward's span by which viewers show it; `agl.reward.*` are what is read."""
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"
ERROR_TYPE: Final = "error.type"

INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
HANDOFF: Final = "handoff"
REWARD: Final = "reward"
MESSAGE: Final = "message"
OBJECT: Final = "object"
EXCEPTION: Final = "exception"
OPERATION: Final = "operation"
POLICY_FAULT: Final = "policy_fault"
MEMORY: Final = "memory"

ROLLOUT_ID: Final = "agl.rollout.id"
ATTEMPT: Final = "agl.attempt"
SEQUENCE: Final = "agl.sequence"
"""On spans that agl makes: a number that grows in the order in which they begin (`agl.mdp.order`)."""
ROUTED: Final = "agl.routed"
"""On `chat` spans: whether the call went to the gateway."""
RECEIVED: Final = "agl.received"
"""On spans of requests to the gateway: ids of the responses that arrived whole. Nobody has seen the others."""
UNTRAINED: Final = "agl.untrained"
"""On every span inside `tracing.untrained`: its LLM calls are not the agent's actions."""
PREVIOUS_RESPONSE: Final = "agl.previous_response"
"""On `chat` spans: the request continues this response or conversation; the provider keeps its messages."""
WIRE_CALLS: Final = "agl.wire_calls"
"""On `chat` spans: how many SDK requests were seen inside."""
CLIENT: Final = "agl.client"
"""On `chat` spans: the class of the client that made the call."""
URL: Final = "agl.url"
"""On `chat` spans: the URL that the client was set up with."""
SYSTEM_PROMPTS: Final = "agl.system_prompts"
"""On `chat` spans of an agent with a replaced system prompt: names of the prompts in the request."""
SYSTEM_PROMPT_LEFT: Final = "agl.system_prompt.left"
"""On such spans where none fitted: the beginning of the system prompt that the agent sent; "" for none."""
RUNS_TOOLS: Final = "agl.runs_tools"
"""On `chat` spans: the framework itself runs the tools of the response, so a tool without a span was refused."""
ISSUED_BY: Final = "agl.issued_by"
"""On `execute_tool` spans: id of the `chat` span that asked for the tool, where it asked in text."""
STRUCTURED_ANSWERS: Final = "agl.structured_answers"
"""On spans of agents and their calls: ids of tool calls that are structured answers, so that no tool runs."""
RESUMED_WITH: Final = "agl.resumed_with"
"""On spans of what runs after a pause: what a person answered, a text for each resumption."""
FAILED_BY_RESULT: Final = "agl.failed_by_result"
"""On `execute_tool` spans with an error: nothing was raised or marked; what the tool returned says that it failed."""
PAUSED: Final = "agl.paused"
"""On `execute_tool` spans: the tool stopped to ask a human, so it has not ended yet."""
HANDOFF_FROM: Final = "agl.handoff.from"
"""On `handoff` spans: the agent that hands over; on a tool's span it is the span's agent."""
HANDOFF_TO: Final = "agl.handoff.to"
"""On `handoff` spans, and on those of tools that hand over: the agent that continues."""
REWARD_CALL: Final = "agl.reward.call"
"""On rewards of AIR: the id of the call that earned it; "" for the whole rollout."""
REWARD_NAME: Final = "agl.reward.name"
REWARD_VALUE: Final = "agl.reward.value"
REWARD_PRIMARY: Final = "agl.reward.primary"
REWARD_SOURCE: Final = "agl.reward.source"
REWARD_AGENT: Final = "agl.reward.agent"
LABEL: Final = "label"
"""The source of a reward that a person gave afterwards: the newest of a name counts, and one without a value withdraws
it."""
REWARD_LAST: Final = "agl.reward.last"
"""On rewards of which the attempt's last alone counts; none of them does where the agent returned a reward."""
VALUE: Final = "agl.value"
"""On emitted messages and objects: the text, or the JSON."""
INFERRED: Final = "agl.inferred"
"""On `execute_tool` spans: made from the ids in requests and responses; start and end are outer bounds."""
OUTPUT: Final = "agl.output"
"""On the root span: the text of what the agent gave."""
GRADING_SECONDS: Final = "agl.grading.seconds"
"""On the root span: how long its reward function took."""
AGENT_ERROR: Final = "agl.agent_error"
"""On the root span: what the agent itself raised, if it was neither agl nor the connection to a model."""
AGENT_ERROR_CAUSE: Final = "agl.agent_error.cause"
"""On such spans: what the exception itself says, or its framework's adapter of its class, a key of
`agl.mdp.faults.CAUSES`."""
AGENT_ERROR_INPUTS: Final = "agl.agent_error.inputs"
"""On such spans: what could not be read (`agl.mdp.evidence.unreadable_inputs`), to be compared with the answers."""
AGENT_ERROR_PLACE: Final = "agl.agent_error.place"
"""On such spans: the line of the user's code that raised, if nothing but that code can have caused it, else ""."""
AGENT_ERROR_OF_SERVICE: Final = "agl.agent_error.of_service"
"""On such spans: that a service, such as a model's provider, answered so; absent otherwise."""
REWARD_ERROR: Final = "agl.reward_error"
"""On the root span: the reward function that raised, and where; such an error is never the policy's."""
FAULT_CAUSE: Final = "agl.policy_fault.cause"
FAULT_CALL: Final = "agl.policy_fault.call"
"""On `policy_fault` spans: a key of `agl.mdp.faults.CAUSES`, and the id of the call that gave the answer."""
EXIT_STATUS: Final = "agl.exit_status"
"""On the root span of a command: its exit status; negative for a signal."""
MEMORY_SNAPSHOT: Final = "agl.memory.snapshot"
"""On searches of a memory: which version of it was read, "run@steps"."""
MEMORY_QUERY: Final = "agl.memory.query"
MEMORY_KEYS: Final = "agl.memory.keys"
"""On searches: what was found, "namespace/.../key", best first; on writes: the key, if the agent chose it."""
MEMORY_SCORES: Final = "agl.memory.scores"
MEMORY_NAMESPACE: Final = "agl.memory.namespace"
MEMORY_TEXT: Final = "agl.memory.text"
"""On writes: JSON of the namespace, if not the agent's own; what searches read, if not the value's texts."""

TEXTS: Final = frozenset(
    {
        INPUT_MESSAGES,
        OUTPUT_MESSAGES,
        SYSTEM_INSTRUCTIONS,
        TOOL_DEFINITIONS,
        TOOL_CALL_ARGUMENTS,
        TOOL_CALL_RESULT,
        EVALUATION_EXPLANATION,
        SYSTEM_PROMPT_LEFT,
        VALUE,
        OUTPUT,
        MEMORY_QUERY,
        MEMORY_TEXT,
        "exception.message",
        "exception.stacktrace",
    }
)
"""Attributes of spans and events that hold texts; with `capture_content=False` none is recorded."""
