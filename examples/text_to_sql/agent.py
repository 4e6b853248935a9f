"""Four agents that answer a question from a SQLite database, as a LangGraph program: nothing here imports agl.

The writer requests one query, the checker says OK or what is wrong, the rewriter requests another one, at most `ROUNDS`
times, and the answerer states the result. python agent.py DATABASE.sqlite "question"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import InjectedState, ToolNode

AGENTS = ("writer", "checker", "rewriter", "answerer")
ROUNDS = 2
MAX_ROWS = 20
MAX_TEXT = 2000
SECONDS = 5.0

PROMPTS = {
    "writer": "Write one SQLite query that answers the question, and run it with the tool run_sql.",
    "checker": "Does this query answer the question? Reply OK, or say in one sentence what is wrong.",
    "rewriter": "The query does not answer the question. Run a better one with the tool run_sql.",
    "answerer": "Answer the question from the result, in one sentence. If there is no result, say so.",
}


class State(TypedDict, total=False):
    """What the agents share.

    `id`, `question`, `schema` and `database` (a path) are the input. `messages` holds the tool calls and their results;
    `query` is the last one that was requested ("" if the last turn requested none), `verdict` the checker's reply,
    `rewrites` the number of rewrites, `answer` the final answer.
    """

    id: str
    question: str
    schema: str
    database: str
    messages: Annotated[list[AnyMessage], add_messages]
    query: str
    verdict: str
    rewrites: int
    answer: str


Node = Callable[[State], Awaitable[dict[str, Any]]]


# -- the tool ---------------------------------------------------------------------------------------------------------


@tool(response_format="content_and_artifact")
def run_sql(query: str, database: Annotated[str, InjectedState("database")]) -> tuple[str, list[tuple[Any, ...]]]:
    """Run one SELECT query on the database and read its rows."""
    deadline = time.thread_time() + SECONDS
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
        connection.set_authorizer(_reading_only)
        connection.set_progress_handler(lambda: int(time.thread_time() > deadline), 1000)
        try:
            cursor = connection.execute(query)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise ToolException(str(error)) from error
        names = [column[0] for column in cursor.description or ()]
    lines = [" | ".join(map(str, row)) for row in (names, *rows[:MAX_ROWS])]
    more = "\n(there are more rows)" if len(rows) > MAX_ROWS else ""
    return "\n".join(lines)[:MAX_TEXT] + more, rows[:MAX_ROWS]


def _reading_only(action: int, *_: object) -> int:
    reading = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in reading else sqlite3.SQLITE_DENY


def _error_text(error: ToolException) -> str:
    """The tool's answer to the model when a query failed, or a call was invalid."""
    return f"error: {error}"[:MAX_TEXT]


# -- the agents -------------------------------------------------------------------------------------------------------


def nodes(models: Mapping[str, BaseChatModel]) -> dict[str, Node]:
    """Name -> the agent's turn, with a model for each."""
    with_tools = {name: models[name].bind_tools([run_sql]) for name in ("writer", "rewriter")}

    async def ask(name: str, state: State, *facts: str) -> AIMessage:
        model = with_tools.get(name, models[name])
        messages = [SystemMessage(PROMPTS[name]), HumanMessage("\n\n".join((*facts, f"Question: {state['question']}")))]
        return await model.ainvoke(messages)

    async def writer(state: State) -> dict[str, Any]:
        return _turn(await ask("writer", state, state["schema"]))

    async def checker(state: State) -> dict[str, Any]:
        reply = await ask("checker", state, state["schema"], *last_query(state))
        return {"verdict": reply.text.strip()}

    async def rewriter(state: State) -> dict[str, Any]:
        reply = await ask("rewriter", state, state["schema"], *last_query(state), f"What is wrong: {state['verdict']}")
        return {**_turn(reply), "rewrites": state.get("rewrites", 0) + 1}

    async def answerer(state: State) -> dict[str, Any]:
        reply = await ask("answerer", state, *last_query(state))
        return {"answer": reply.text.strip()}

    return {"writer": writer, "checker": checker, "rewriter": rewriter, "answerer": answerer}


def approved(verdict: str) -> bool:
    """Whether the checker's reply is OK."""
    return verdict.upper().startswith("OK")


def rows(state: State) -> list[tuple[Any, ...]] | None:
    """The rows of the last query; None if it failed or there was none."""
    result = _result(state)
    return None if result is None or result.status == "error" else result.artifact


def last_query(state: State) -> tuple[str, str]:
    """The last query and its result, as text for the agents."""
    result = _result(state)
    if result is None:
        return "Query: none", "Result: no query was run"
    return f"Query: {state['query']}", f"Result:\n{result.text}"


def _turn(reply: AIMessage) -> dict[str, Any]:
    """The state's update: one query a turn; further tool calls of a reply are not run."""
    calls = [c for c in reply.tool_calls if c["name"] == run_sql.name][:1]
    message = AIMessage(reply.text, tool_calls=calls)
    return {"messages": [message], "query": str(calls[0]["args"].get("query", "")) if calls else ""}


def _result(state: State) -> ToolMessage | None:
    last = state["messages"][-1]
    return last if isinstance(last, ToolMessage) else None


# -- the program ------------------------------------------------------------------------------------------------------


def program(agents: Mapping[str, Node], *, rounds: int = ROUNDS) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph of the agents' turns.

    Args:
        agents: the result of `nodes`.
        rounds: how often the rewriter may try.
    """

    def after_query(state: State) -> str:
        last = state["messages"][-1]
        return "database" if isinstance(last, AIMessage) and last.tool_calls else "checker"

    def after_check(state: State) -> str:
        if approved(state["verdict"]) or state.get("rewrites", 0) >= rounds:
            return "answerer"
        return "rewriter"

    graph = StateGraph(State)
    for name in AGENTS:
        graph.add_node(name, agents[name])
    graph.add_node("database", ToolNode([run_sql], handle_tool_errors=_error_text))
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", after_query, ["database", "checker"])
    graph.add_conditional_edges("rewriter", after_query, ["database", "checker"])
    graph.add_edge("database", "checker")
    graph.add_conditional_edges("checker", after_check, ["rewriter", "answerer"])
    graph.add_edge("answerer", END)
    return graph.compile(name="text_to_sql")


def chat_models(
    model: str = "gpt-4.1-mini", base_url: str | None = None, api_key: str | None = None, max_tokens: int = 512
) -> dict[str, BaseChatModel]:
    """One model of an OpenAI-compatible provider for all four agents."""
    key = api_key or os.environ.get("OPENAI_API_KEY", "set OPENAI_API_KEY to use a provider")
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=key, max_completion_tokens=max_tokens)  # type: ignore[arg-type]
    return dict.fromkeys(AGENTS, chat)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with contextlib.closing(sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)) as opened:
        tables = opened.execute("SELECT sql FROM sqlite_master WHERE type = 'table'").fetchall()
    start = State(question=sys.argv[2], schema="\n".join(t for (t,) in tables), database=sys.argv[1])
    print(asyncio.run(program(nodes(chat_models())).ainvoke(start))["answer"])
