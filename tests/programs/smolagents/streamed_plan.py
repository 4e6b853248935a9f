"""A streamed run with plans in between: what the caller sees of it, step by step."""

from smolagents import (
    ActionStep,
    ChatMessageStreamDelta,
    FinalAnswerStep,
    OpenAIModel,
    PlanningStep,
    ToolCallingAgent,
    ToolOutput,
    tool,
)


@tool
def measure(room: str) -> float:
    """Measures the temperature of a room.

    Args:
        room: The room's name.
    """
    return {"kitchen": 21.5, "cellar": 9.0}[room]


keeper = ToolCallingAgent(
    tools=[measure],
    model=OpenAIModel(model_id="gpt-4.1-mini"),
    name="keeper",
    description="Knows how warm the house is.",
    planning_interval=2,
    stream_outputs=True,
    verbosity_level=0,
)
text = ""
for event in keeper.run("Which room is colder, the kitchen or the cellar?", stream=True):
    match event:
        case ChatMessageStreamDelta():
            text += event.content or ""
        case PlanningStep():
            print("plan:", text.strip())
            text = ""
        case ToolOutput():
            print("tool:", event.observation)
        case ActionStep():
            print("step", event.step_number, [call.name for call in event.tool_calls or ()])
        case FinalAnswerStep():
            print("answer:", event.output)
