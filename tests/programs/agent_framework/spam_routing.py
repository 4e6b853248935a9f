"""A workflow by hand: an agent classifies mails as a pydantic object, and a switch decides who goes on."""

import asyncio
from typing import Literal, Never

from agent_framework import Agent, AgentExecutor, AgentExecutorResponse, Case, Default, WorkflowBuilder, executor
from agent_framework import WorkflowContext as Context
from agent_framework.openai import OpenAIChatClient
from pydantic import BaseModel


class Verdict(BaseModel):
    kind: Literal["spam", "question"]
    mail: str


client = OpenAIChatClient(model="gpt-4.1-mini")
detector = AgentExecutor(
    Agent(client=client, instructions="You classify mails.", default_options={"response_format": Verdict}),
    id="spam_detector",
)
assistant = AgentExecutor(Agent(client=client, name="mail_assistant", instructions="You answer mails."))


@executor(id="parse")
async def parse(response: AgentExecutorResponse, ctx: Context[Verdict]) -> None:
    await ctx.send_message(Verdict.model_validate_json(response.agent_response.text))


@executor(id="ask_assistant")
async def ask_assistant(verdict: Verdict, ctx: Context[str]) -> None:
    await ctx.send_message(verdict.mail)


@executor(id="send")
async def send(response: AgentExecutorResponse, ctx: Context[Never, str]) -> None:
    await ctx.yield_output(f"sent: {response.agent_response.text}")


@executor(id="drop")
async def drop(verdict: Verdict, ctx: Context[Never, str]) -> None:
    await ctx.yield_output(f"dropped: {verdict.mail}")


async def main() -> None:
    workflow = (
        WorkflowBuilder(start_executor=detector, output_from=[send, drop])
        .add_edge(detector, parse)
        .add_switch_case_edge_group(
            parse, [Case(lambda verdict: verdict.kind == "question", ask_assistant), Default(drop)]
        )
        .add_chain([ask_assistant, assistant, send])
        .build()
    )
    for mail in ("When do you open?", "You have won a prize."):
        print(*(await workflow.run(mail)).get_outputs())


asyncio.run(main())
