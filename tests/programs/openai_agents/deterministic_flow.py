"""A fixed flow: an outline, a checker with structured output as a gate, then the story, all with `run_sync`."""

from agents import Agent, RunConfig, Runner, trace
from opentelemetry import trace as otel
from pydantic import BaseModel

tracer = otel.get_tracer("stories")


class OutlineCheck(BaseModel):
    good_quality: bool
    is_scifi: bool


outliner = Agent(
    name="story_outline_agent",
    instructions="Write a very short story outline from the user's input.",
)
checker = Agent(
    name="outline_checker_agent",
    instructions="Judge the quality of the outline, and whether it is a science fiction story.",
    output_type=OutlineCheck,
)
writer = Agent(
    name="story_agent",
    instructions="Write a short story from the given outline.",
    output_type=str,
)


def story(about: str) -> str:
    config = RunConfig(workflow_name="Story", group_id="stories", trace_metadata={"about": about})
    outline = Runner.run_sync(outliner, about, run_config=config).final_output
    with tracer.start_as_current_span("gate") as span:
        checked = Runner.run_sync(checker, outline, run_config=config).final_output
        span.set_attribute("story.passed", checked.good_quality and checked.is_scifi)
    if not (checked.good_quality and checked.is_scifi):
        return "stopped at the gate"
    return Runner.run_sync(writer, outline, run_config=config).final_output


with trace("Deterministic story flow"), tracer.start_as_current_span("stories"):
    print(story("A robot who learns to whistle"))
    print(story("A dull day"))
