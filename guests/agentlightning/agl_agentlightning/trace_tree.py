"""0.3's `TraceTree`: spans by their parents, the LLM calls among them with their agents and rewards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl import semconv
from agl.errors import ConfigError
from agl.messages import Message, read, write
from agl_agentlightning import types as T
from agl_agentlightning.attributes import filter_and_unflatten_attributes
from agl_agentlightning.emitter import get_reward_value
from agl_agentlightning.semconv import AGL_OPERATION, AGL_REWARD, LightningSpanAttributes

__all__ = ["CALL_NAMES", "LLM_CALL", "TraceTree", "counted_reward", "is_call", "to_triplet"]

LLM_CALL = r"openai\.chat\.completion"
CALL_NAMES = ("openai.chat.completion", "chat")
"""Names of an LLM call's span in 0.3; agl's is `chat <model>`."""


def is_call(span: T.Span, pattern: str) -> bool:
    """Whether a span, agl's or 0.3's, is an LLM call whose name the pattern matches."""
    own = _operation(span) == semconv.CHAT
    return any(re.search(pattern, name) for name in (span.name, *(CALL_NAMES if own else ())))


def counted_reward(span: T.Span) -> float | None:
    """The primary reward of a span; None if a later reward of the rollout took its place."""
    superseded = (span.attributes or {}).get(semconv.REWARD_PRIMARY) is False
    return None if superseded else get_reward_value(span)


def to_triplet(span: T.Span, agent: str) -> T.Triplet:
    """The tokens and messages of an LLM call, without its reward."""
    facts = span.attributes or {}
    prompt = filter_and_unflatten_attributes(facts, "gen_ai.prompt") or _openai(read.sent(span))
    answer = filter_and_unflatten_attributes(facts, "gen_ai.completion") or _openai(read.said(span))
    response: dict[str, Any] = {"token_ids": list(facts.get(T.RESPONSE_TOKEN_IDS, ())), "raw_content": answer}
    if isinstance(logprobs := facts.get("logprobs.content"), str):
        response["logprobs"] = json.loads(logprobs)
    return T.Triplet(
        prompt={
            "token_ids": list(facts.get(T.PROMPT_TOKEN_IDS, ())),
            "raw_content": prompt,
            "image_urls": list(_image_urls(prompt)),
        },
        response=response,
        metadata={
            "request": filter_and_unflatten_attributes(facts, "gen_ai.request") or None,
            "response": filter_and_unflatten_attributes(facts, "gen_ai.response") or None,
            "response_id": facts.get(semconv.RESPONSE_ID),
            "agent_name": agent,
        },
    )


class TraceTree:
    """A span and those within it."""

    def __init__(self, id: str, span: T.Span, children: Sequence[TraceTree] | None = None) -> None:
        self.id, self.span, self.children = id, span, list(children or ())

    @classmethod
    def from_spans(cls, spans: Sequence[T.Span]) -> TraceTree:
        """The tree of a trace; a lost parent, and a root above several roots, become virtual spans.

        Raises:
            ValueError: there are no spans.
        """
        if not spans:
            raise ValueError("there are no spans to make a tree of")
        by_id = {s.span_id: s for s in spans}
        within: dict[str | None, list[str]] = {}
        for span in by_id.values():
            within.setdefault(span.parent_id, []).append(span.span_id)

        def grown(id: str) -> TraceTree:
            children = [grown(child) for child in within.get(id, ())]
            return cls(id, by_id.get(id) or _virtual(id, None, children), children)

        lost = [p for p in within if p is not None and p not in by_id]
        roots = [grown(id) for id in (*within.get(None, ()), *lost)]
        return roots[0] if len(roots) == 1 else cls("virtual-root", _virtual(None, "virtual-root", roots), roots)

    @property
    def start_time(self) -> float | None:
        return self.span.start_time

    @property
    def end_time(self) -> float | None:
        return self.span.end_time

    def add_child(self, child: TraceTree) -> None:
        self.children.append(child)

    def traverse(self) -> list[TraceTree]:
        """This span and all within it, depth first."""
        return [self, *(node for child in self.children for node in child.traverse())]

    def find_id(self, id: str) -> TraceTree | None:
        """The span with this id, here or within."""
        return next((node for node in self.traverse() if node.id == id), None)

    def names_tuple(self) -> tuple[str, list[Any]]:
        """(name [agent], the same of each child)."""
        agent = self.agent_name()
        return f"{self.span.name} [{agent}]" if agent else self.span.name, [c.names_tuple() for c in self.children]

    def to_json(self) -> dict[str, Any]:
        """Ids, spans and children."""
        return {"id": self.id, "span": self.span.model_dump(), "children": [c.to_json() for c in self.children]}

    def visualize(self, filename: str, interested_span_match: str | None = None) -> None:
        """Draw the tree as `<filename>.png`.

        Args:
            interested_span_match: regular expression; spans without a match, here or within, are left out.

        Raises:
            ConfigError: the package graphviz is not installed.
        """
        try:
            import graphviz  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("visualize() needs the package graphviz", hint="pip install graphviz") from error
        drawing = graphviz.Digraph(comment="Trace Tree")
        shown = [
            node
            for node in self.traverse()
            if interested_span_match is None
            or any(re.search(interested_span_match, inner.span.name) for inner in node.traverse())
        ]
        ids = {node.id for node in shown}
        for node in shown:
            drawing.node(node.id, f"{node.id[-8:]} ({node.names_tuple()[0]})")
            for child in node.children:
                if child.id in ids:
                    drawing.edge(node.id, child.id)
        drawing.render(filename, format="png", cleanup=True)

    def agent_name(self) -> str | None:
        """The agent that this span names, in agl's way or that of one of 0.3's instrumentations."""
        facts = self.span.attributes or {}
        names = [facts.get(semconv.AGENT_NAME), facts.get("agent.name")]
        if facts.get("agentops.span.kind") == "agent":
            names.append(facts.get("operation.name"))
        names += [facts.get(k) for k in ("recipient_agent_type", "langchain.chain.type", "executor.id")]
        if facts.get("type") == "agent":
            names.append(facts.get(f"{LightningSpanAttributes.OPERATION_INPUT.value}.name"))
        if self.span.name.startswith("langchain.Chain."):
            names.append(facts.get("lc_name"))
        return next((str(n) for n in names if n is not None), None)

    def maybe_reward_dict(self) -> dict[str, Any]:
        """{"type": "reward", "value": ...}; {} for a span without a reward."""
        value = counted_reward(self.span)
        return {} if value is None else {"type": "reward", "value": value}

    def is_reward_span(self) -> bool:
        """Whether the span holds a reward, or is that of computing one."""
        facts = self.span.attributes or {}
        computed = facts.get(LightningSpanAttributes.OPERATION_NAME.value) == AGL_REWARD
        return bool(self.maybe_reward_dict()) or (self.span.name == AGL_OPERATION and computed)

    def find_llm_calls(
        self,
        *,
        llm_call_match: str,
        agent_match: str | None,
        within_matching_subtree: str | None = None,
        within_reward: bool | None = None,
        within_llm_call: bool | None = None,
        existing_llm_call_response_ids: set[str] | None = None,
    ) -> list[tuple[TraceTree, str]]:
        """(call, its agent) of each call of a matching agent.

        Args:
            llm_call_match, agent_match: regular expressions; None matches every agent.
            within_matching_subtree: the matching agent around this span; "*" where no agent is asked for.
            within_reward: whether this lies in a reward's span, whose calls are left out; None leaves none out.
            within_llm_call: whether this lies in another call, where one without a response id is the same call again;
                None: it is another one.
            existing_llm_call_response_ids: calls with these are found already.
        """
        seen = set[str]() if existing_llm_call_response_ids is None else existing_llm_call_response_ids
        agent = self.agent_name()
        if agent is not None:
            within_matching_subtree = agent if agent_match is None or re.search(agent_match, agent) else None
        calls = []
        if within_matching_subtree is not None and not within_reward and is_call(self.span, llm_call_match):
            response_id = (self.span.attributes or {}).get(semconv.RESPONSE_ID)
            if response_id not in seen and not (response_id is None and within_llm_call):
                calls.append((self, within_matching_subtree))
                within_llm_call = None if within_llm_call is None else True
            if response_id is not None:
                seen.add(str(response_id))
        if within_reward is not None and self.is_reward_span():
            within_reward = True
        for child in self.children:
            calls += child.find_llm_calls(
                llm_call_match=llm_call_match,
                agent_match=agent_match,
                within_matching_subtree=within_matching_subtree,
                within_reward=within_reward,
                within_llm_call=within_llm_call,
                existing_llm_call_response_ids=seen,
            )
        return calls

    def repair_hierarchy(self) -> None:
        """Move the children of the root under the shortest span that encloses them in time: some of 0.3's
        instrumentations lost the parents of their calls. agl's spans have theirs."""
        root = self
        while len(root.children) == 1:
            root = root.children[0]
        for node in list(root.children):
            if _operation(node.span) or len(root.children) == 1:
                continue
            own = {n.id for n in node.traverse()}
            around = [
                n for n in root.traverse()[1:] if n.id not in own and _length(n) > _length(node) and _encloses(n, node)
            ]
            if around:
                root.children.remove(node)
                min(around, key=_length).add_child(node)

    def match_rewards(self, reward_match: str, llm_calls: Sequence[TraceTree]) -> dict[str, float | None]:
        """Call's id -> its reward: each reward goes to the last call that ended before it and has none yet, of the
        whole trace or ("first_sibling") of the reward's siblings."""
        ids = {call.id for call in llm_calls}
        groups = [sorted(self.traverse(), key=lambda node: (node.span.sequence_id, _start(node)))]
        if reward_match == "first_sibling":
            groups = [node.children for node in self.traverse()]
        rewards: dict[str, float | None] = {}
        for group in groups:
            earlier: list[TraceTree] = []
            for node in group:
                if node.id in ids:
                    earlier.append(node)
                if (value := counted_reward(node.span)) is not None:
                    ended = (c for c in reversed(earlier) if _is_before(c, node) and c.id not in rewards)
                    if (call := next(ended, None)) is not None:
                        rewards[call.id] = value
        return rewards

    def extract_prompt_image_urls(self, prompt_raw_content: Any) -> list[str]:
        """URLs of the images in a prompt, in order."""
        return list(_image_urls(prompt_raw_content))

    def span_to_triplet(self, span: T.Span, agent_name: str) -> T.Triplet:
        """A call as a triplet; subclasses may add to it."""
        return to_triplet(span, agent_name)

    def to_trajectory(
        self,
        llm_call_match: str = LLM_CALL,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        dedup_llm_call: bool = True,
        reward_match: str = "first_occurrence",
        final_reward: float | None = None,
        _skip_empty_token_spans: bool = False,
    ) -> list[T.Triplet]:
        """A triplet for each LLM call; `final_reward` is given to the last one."""
        found = self.find_llm_calls(
            llm_call_match=llm_call_match,
            agent_match=agent_match,
            within_matching_subtree="*" if agent_match is None else None,
            within_reward=False if exclude_llm_call_in_reward else None,
            within_llm_call=False if dedup_llm_call else None,
        )
        triplets = [(call, self.span_to_triplet(call.span, agent)) for call, agent in found]
        if _skip_empty_token_spans:
            triplets = [(c, t) for c, t in triplets if t.prompt["token_ids"] and t.response["token_ids"]]
        rewards = self.match_rewards(reward_match, [call for call, _ in triplets])
        for call, triplet in triplets:
            triplet.reward = rewards.get(call.id)
        if final_reward is not None and triplets:
            triplets[-1][1].reward = final_reward
        return [triplet for _, triplet in triplets]


def _operation(span: T.Span) -> str:
    """agl's operation; "" for a span of 0.3."""
    return str((span.attributes or {}).get(semconv.OPERATION_NAME, ""))


def _virtual(id: str | None, name: str | None, children: Sequence[TraceTree]) -> T.Span:
    first = children[0].span
    return T.Span.from_attributes(
        attributes={},
        rollout_id=first.rollout_id,
        attempt_id=first.attempt_id,
        sequence_id=first.sequence_id,
        trace_id=first.trace_id,
        span_id=id,
        name=name,
        start_time=min((c.start_time for c in children if c.start_time is not None), default=None),
        end_time=max((c.end_time for c in children if c.end_time is not None), default=None),
    )


def _start(node: TraceTree) -> float:
    return -math.inf if node.start_time is None else node.start_time


def _end(node: TraceTree) -> float:
    return _start(node) if node.end_time is None else node.end_time


def _is_before(call: TraceTree, node: TraceTree) -> bool:
    """Whether a call had ended: by the numbers of the spans, which no clock sets back, else by their times."""
    if call.span.sequence_id != node.span.sequence_id:
        return call.span.sequence_id < node.span.sequence_id
    return _end(call) <= _start(node)


def _length(node: TraceTree) -> float:
    return _end(node) - _start(node) if node.start_time is not None else math.inf


def _encloses(outer: TraceTree, inner: TraceTree) -> bool:
    return _start(outer) <= _start(inner) and _end(inner) <= _end(outer)


def _openai(messages: Sequence[Message]) -> str | None:
    return json.dumps(write.to_openai(messages, text_only=False)) if messages else None


def _image_urls(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, Mapping):
        numbered = sorted(filter(str.isdigit, prompt), key=int)
        prompt = [prompt[k] for k in numbered] if numbered else [prompt]
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            try:
                content = json.loads(content)
            except json.JSONDecodeError:
                continue
        for part in content if isinstance(content, list) else ():
            image = part.get("image_url") if isinstance(part, Mapping) and part.get("type") == "image_url" else None
            if isinstance(image, Mapping) and "url" in image:
                yield image["url"]
