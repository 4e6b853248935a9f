"""Agents in processes that `multiprocessing` spawns: each judges one essay, and the parent sums up."""

import asyncio
import multiprocessing

from agents import Agent, Runner
from pydantic_ai import Agent as PydanticAgent

grader = Agent(name="grader", instructions="Give a grade from 1 to 6.", model="gpt-4.1-mini")
principal = PydanticAgent("openai-chat:gpt-4.1-mini", name="principal", instructions="Say how the class did.")


def grade(essay: str) -> str:
    result = asyncio.run(Runner.run(grader, essay))
    return f"{essay}: {result.final_output}"


def main() -> None:
    essays = ["My holidays", "Why whales sing"]
    # The SDK keeps its HTTP client for the next event loop, which cannot use it: a process grades one essay.
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        grades = pool.map(grade, essays, chunksize=1)
        pool.close()
        pool.join()
    print("\n".join(grades))
    print(principal.run_sync("; ".join(grades)).output)


if __name__ == "__main__":
    main()
