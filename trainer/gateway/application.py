"""A gateway for applications: without rollouts and leases, with a key for each application and policies by their names.

Invariant: a request that continues an answer belongs to that answer's conversation, and continues its tokens exactly,
as in training; any other begins a conversation. How many are remembered is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from agl.mdp.selection import Selection
from agl.mdp.types import Call
from agl.trainer.gateway.access import Access, PendingRequest, SamplingRules
from agl.trainer.gateway.calls import ChatRequest, OnTokens, Reply
from agl.trainer.gateway.errors import RequestError
from agl.trainer.gateway.gateway import CallStore, Gateway
from agl.trainer.gateway.metrics import Metrics
from agl.trainer.gateway.recent_responses import RecentResponses
from agl.trainer.gateway.sessions import chain_of
from agl.trainer.http.application_keys import ApplicationKeys
from agl.trainer.http.turns import LARGE_MESSAGES, TurnsByName
from agl.trainer.store.types import new_rollout_id

log = logging.getLogger("agl.serve")

CONVERSATIONS = 1024
"""Conversations that are remembered; beyond that the one that was idle longest is forgotten."""
CALLS = 1024
"""Calls of one conversation; what would continue it then begins another one."""
MOST_REQUESTS = 128
"""Requests of one application at once, running and waiting, where nothing else is said."""
RECORD_SECONDS = 10.0
"""How long the end of an answer waits for its record. A store that somebody has locked must not stop applications."""

_PLACE = "/rollouts/application/attempts/1/agents/application"
_VERSIONS = ("/v1/", "/v1beta/", "/v1alpha/")


class ApplicationPaths:
    """Lets an application's URL be the server's own: `/v1/...` and Google's `/v1beta/...` stand for an attempt's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_VERSIONS):
            scope = {**scope, "path": _PLACE + scope["path"], "raw_path": None}
        await self.app(scope, receive, send)


@dataclass(eq=False, kw_only=True)
class Conversation(Access):
    """A conversation of an application, in the place of an attempt. Attributes: application: its name."""

    application: str

    def request_seed(self, index: int, choice: int, agent_seed: int = 0) -> int:
        """The seed of one answer: the same for the same seed of the application, wherever its request belongs."""
        if not agent_seed:
            return super().request_seed(index, choice)
        text = f"{agent_seed}/{choice}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class ApplicationGateway(Gateway):
    """Serves policies to applications.

    Args:
        keys: of the applications.
        store: what gets each call; None keeps none.
        most_requests: of one application at once; a further one is refused with 429.
        capture_content: as for `Gateway`.

    Attributes:
        metrics: of what was served.
        turns: of each application's large requests.
    """

    def __init__(
        self,
        keys: ApplicationKeys,
        store: CallStore | None = None,
        *,
        most_requests: int = MOST_REQUESTS,
        capture_content: bool = True,
    ) -> None:
        super().__init__(store or _Nowhere(), capture_content=capture_content and store is not None)
        self.keys = keys
        self.most_requests = most_requests
        self.metrics = Metrics()
        self.turns = TurnsByName()
        self._open: Counter[str] = Counter()
        self._is_late = False
        self._responses: dict[str, RecentResponses] = {}
        self._conversations: OrderedDict[Conversation, set[tuple[str, bytes]]] = OrderedDict()
        """Conversation -> its entries in `_ends`; the one that was idle longest comes first."""
        self._ends: dict[tuple[str, bytes], Conversation] = {}
        """Application and chain entry of a history that ends with a sampled answer -> its conversation."""

    def find_attempt(self, rollout_id: str, attempt: int, headers: Mapping[str, str]) -> Access:
        """The conversation that a request would begin; `complete` finds the one that it continues.

        Raises:
            RequestError: 401, the key is no application's.
        """
        application = self.application_of(headers)
        longest = max(self.models, key=lambda name: self.served(name).engine.max_context)
        return Conversation(
            new_rollout_id(),
            1,
            Selection((("*", longest),)),
            secrets.randbits(62),
            SamplingRules(),
            self.base_url,
            b"",
            responses=self._responses.setdefault(application, RecentResponses()),
            turns=self.turns.of(application),
            application=application,
        )

    def application_of(self, headers: Mapping[str, str]) -> str:
        """The application that sent a request with these headers.

        Raises:
            RequestError: 401, the key is no application's.
        """
        application = self.keys.application(headers)
        if application is None:
            self.metrics.refused("unknown", 401)
            raise RequestError(
                401,
                "the key is none of this server's: send an application's as Authorization: Bearer KEY, x-api-key or "
                "x-goog-api-key",
                code="invalid_api_key",
            )
        return application

    def policy_named(self, model: str, policy: str | None) -> str | None:
        """The policy that a request names. A single policy has every name.

        Raises:
            RequestError: 404, there are several, none of which is called that.
        """
        if model in self.models:
            return model
        if len(self.models) == 1:
            return self.models[0]
        known = ", ".join(map(repr, self.models))
        raise RequestError(
            404, f"no policy {model!r} is served here, but {known}", code="model_not_found", param="model"
        )

    def begin_request(
        self, access: Access, agent: str, response_id: str, span_id: str | None = None, retry: int = 0
    ) -> PendingRequest:
        """As of any gateway; the agent is the application, and spans of the client's are its own.

        Raises:
            RequestError: 429, the application has as many requests open as it may.
        """
        assert isinstance(access, Conversation)
        application = access.application
        self.admit_one(application)
        return super().begin_request(access, application, response_id, None, retry)

    def admit_one(self, application: str) -> None:
        """Count one more open request of an application; `ended` must follow.

        Raises:
            RequestError: 429, it has as many as it may.
        """
        if self._open[application] >= self.most_requests:
            self.metrics.refused(application, 429)
            raise RequestError(
                429,
                f"{self.most_requests} requests of {application!r} are running or waiting, which is the limit "
                "(--max-requests of the server); try again",
                code="too_many_requests",
            )
        self._open[application] += 1
        self.metrics.open_requests[application] = self._open[application]

    def ended(self, application: str) -> None:
        """Count one open request less."""
        self._open[application] -= 1
        self.metrics.open_requests[application] = self._open[application]

    def refuse(self, pending: PendingRequest, error: Exception) -> None:
        """End a request that could not be read; nothing is recorded of it."""
        pending.recorded = True
        pending.access.pending.discard(pending)
        self.ended(pending.agent)
        self.metrics.refused(pending.agent, getattr(error, "status", 499))

    async def complete(
        self, pending: PendingRequest, request: ChatRequest, on_tokens: OnTokens | None = None
    ) -> list[Reply]:
        """As of any gateway, in the conversation that the request continues."""
        measured = self.metrics.started(pending.agent, str(pending.policy))
        conversation = None
        try:
            if len(request.messages) > LARGE_MESSAGES:
                chain = await asyncio.to_thread(chain_of, request.messages)
            else:
                chain = chain_of(request.messages)
            conversation = self._enter(pending, chain)
            replies = await super().complete(pending, request, measured.timing(on_tokens))
            self._remember(conversation, chain, replies)
            await self._recorded(conversation)
            measured.answered(replies)
            return replies
        except BaseException as error:
            measured.ended(getattr(error, "status", 499))
            raise
        finally:
            self.ended(pending.agent)
            if conversation is not None:
                # The store has what is wanted of them.
                conversation.calls.clear()
                conversation.writes[:] = [write for write in conversation.writes if not write.done()]

    def _enter(self, pending: PendingRequest, chain: Sequence[bytes]) -> Conversation:
        """Move a request into the conversation that it continues, or keep the one that it has begun."""
        begun = pending.access
        assert isinstance(begun, Conversation)
        ends = ((begun.application, end) for end in reversed(chain[1:-1]))
        found = next((self._ends[end] for end in ends if end in self._ends), None)
        conversation = found if found is not None and found.request_count < CALLS else begun
        if conversation is not begun:
            begun.pending.discard(pending)
            pending.access = conversation
            pending.index = conversation.request_count
            conversation.request_count += 1
            conversation.pending.add(pending)
        else:
            self.admit(conversation)
        self._conversations.setdefault(conversation, set())
        self._conversations.move_to_end(conversation)
        while len(self._conversations) > CONVERSATIONS:
            idle = next((c for c in self._conversations if not c.pending and all(w.done() for w in c.writes)), None)
            if idle is None:
                break
            self._forget(idle)
        return conversation

    def _remember(self, conversation: Conversation, chain: Sequence[bytes], replies: Sequence[Reply]) -> None:
        """Have requests that continue one of these answers find the conversation."""
        for reply in replies:
            end = conversation.application, chain_of([reply.message], chain)[-1]
            self._ends[end] = conversation
            # It may have been forgotten meanwhile.
            self._conversations.setdefault(conversation, set()).add(end)

    def _forget(self, conversation: Conversation) -> None:
        for end in self._conversations.pop(conversation):
            if self._ends.get(end) is conversation:
                del self._ends[end]
        self._accesses.pop((conversation.rollout_id, conversation.attempt), None)

    async def _recorded(self, conversation: Conversation) -> None:
        """Wait until the store has what a conversation was answered: its end is sent then, so that an application has
        no answer that is lost when the server is killed. A store that is locked for long holds nobody up."""
        if not conversation.writes:
            return
        _, late = await asyncio.wait(conversation.writes, timeout=RECORD_SECONDS)
        if late and not self._is_late:
            log.warning(
                "the store takes more than %g s to record an answer; answers are sent before they are recorded, and "
                "are lost if this server is killed",
                RECORD_SECONDS,
            )
        self._is_late = bool(late)

    async def written(self) -> None:
        """Wait until what was answered so far is in the store."""
        for conversation in list(self._conversations):
            for write in list(conversation.writes):
                await write


class _Nowhere:
    """Keeps no calls."""

    async def add_calls(self, calls: Sequence[Call]) -> None:
        pass
