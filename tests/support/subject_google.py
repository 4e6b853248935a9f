"""Bare google-genai clients under the conformance suite: the loop with the tool `add`, over Google's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from subject_openai import PARAMETERS
from subjects import Loop

from agl.adapters.google_genai import GoogleGenAITracer
from agl.testing.subject import KEY, Subject, add


class GenerateLoop(Loop):
    def __init__(self, url: str) -> None:
        from google import genai

        self.client = genai.Client(api_key=KEY, vertexai=False, http_options={"base_url": url.removesuffix("/v1")})

    def opening(self, question: Any) -> list[Any]:
        return [{"role": "user", "parts": [{"text": question}]}]

    def request(self, history: list[Any]) -> dict[str, Any]:
        parameters = {k: v for k, v in PARAMETERS.items() if k != "additionalProperties"}
        function = {"name": "add", "parameters_json_schema": parameters}
        config = {"tools": [{"function_declarations": [function]}], "system_instruction": self.prompt}
        return {"model": "m", "contents": history, "config": config}

    def collect(self, events: Iterable[Any]) -> Any:
        [*chunks] = events
        found = [part for chunk in chunks for part in chunk.candidates[0].content.parts if part.text != ""]
        chunks[-1].candidates[0].content.parts = found
        return chunks[-1]

    def step(self, history: list[Any], answer: Any) -> str | None:
        content = answer.candidates[0].content
        if not answer.function_calls:
            return "".join(part.text for part in content.parts if not part.thought)
        history.append(content)
        for call in answer.function_calls:
            result = {"id": call.id, "name": call.name, "response": {"result": str(add(**call.args))}}
            history.append({"role": "user", "parts": [{"function_response": result}]})
        return None

    def invoke(self, question: str) -> str:
        return self.run(question, lambda request: self.client.models.generate_content(**request))

    async def ainvoke(self, question: str) -> str:
        return await self.arun(question, lambda request: self.client.aio.models.generate_content(**request))

    def stream(self, question: str) -> str:
        generate = self.client.models.generate_content_stream
        return self.run(question, lambda request: self.collect(generate(**request)))

    async def astream(self, question: str) -> str:
        async def ask(request: dict[str, Any]) -> Any:
            events = await self.client.aio.models.generate_content_stream(**request)
            return self.collect([event async for event in events])

        return await self.arun(question, ask)

    def pieces(self, question: Any) -> Iterator[Any]:
        return self.client.models.generate_content_stream(**self.request(self.opening(question)))

    async def apieces(self, question: Any) -> AsyncIterator[Any]:
        async for event in await self.client.aio.models.generate_content_stream(**self.request(self.opening(question))):
            yield event


class BareGoogleGenAI(Subject):
    name = "google_genai"
    tracer = GoogleGenAITracer
    requires = ("google.genai",)
    frameworks = ("google.genai", "openai")
    names_agents = False
    traces_tools = False
    sdk = "google"
    response_id = "gen_"
    finish_reasons = ("STOP", "STOP")
    takes_prompt = True
    ways = ("invoke", "stream")
    async_ways = ("ainvoke", "astream")
    sync_reads = ("pieces",)
    async_reads = ("apieces",)

    def agent(self, url: str, name: str) -> Any:
        loop = GenerateLoop(url)
        loop.prompt = self.prompt
        return loop

    def wrappable(self, url: str, name: str) -> Any:
        return self.agent(url, name).function(name)

    def bad_request(self) -> type[Exception]:
        from google.genai.errors import ClientError

        return ClientError
