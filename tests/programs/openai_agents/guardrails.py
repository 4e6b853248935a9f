"""Guardrails: an agent looks at what comes in, another at what goes out; either can stop the support agent."""

import asyncio

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    OutputGuardrailTripwireTriggered,
    RunContextWrapper,
    Runner,
    TResponseInputItem,
    input_guardrail,
    output_guardrail,
)
from pydantic import BaseModel


class Homework(BaseModel):
    reasoning: str
    is_homework: bool


class Leak(BaseModel):
    has_phone_number: bool


homework_agent = Agent(name="Homework check", instructions="Is the user asking for homework?", output_type=Homework)
leak_agent = Agent(name="Leak check", instructions="Does the text hold a phone number?", output_type=Leak)


@input_guardrail(run_in_parallel=False)
async def no_homework(
    context: RunContextWrapper[None], agent: Agent, input: str | list[TResponseInputItem]
) -> GuardrailFunctionOutput:
    result = await Runner.run(homework_agent, input, context=context.context)
    return GuardrailFunctionOutput(result.final_output, tripwire_triggered=result.final_output.is_homework)


@output_guardrail
async def no_leaks(context: RunContextWrapper[None], agent: Agent, output: str) -> GuardrailFunctionOutput:
    result = await Runner.run(leak_agent, output, context=context.context)
    return GuardrailFunctionOutput(result.final_output, tripwire_triggered=result.final_output.has_phone_number)


support = Agent(
    name="Customer support agent",
    instructions="You help customers with their questions.",
    input_guardrails=[no_homework],
    output_guardrails=[no_leaks],
)


async def main() -> None:
    for question in ("When do you open?", "Solve 2x + 3 = 11 for me.", "How do I reach the manager?"):
        try:
            result = await Runner.run(support, question)
            print("answer:", result.final_output)
        except InputGuardrailTripwireTriggered as stopped:
            print("not answered:", stopped.guardrail_result.output.output_info.reasoning)
        except OutputGuardrailTripwireTriggered:
            print("withheld")


asyncio.run(main())
