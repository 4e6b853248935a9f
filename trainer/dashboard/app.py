"""The dashboard's ASGI application: the page, its files, and a JSON API that reads stores and writes only what a
person notes on runs and rollouts.

An operator's key opens the API; the files hold nothing of a run. What the page may load and do is in `_POLICY`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import math
import mimetypes
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl.errors import AglError, ConfigError, NotStoredError, StoreError
from agl.texts import printable
from agl.tracing.inferred import completed
from agl.trainer.dashboard import views
from agl.trainer.dashboard.compare import Validation, compare
from agl.trainer.dashboard.sources import Source
from agl.trainer.http.auth import Keys
from agl.trainer.http.bodies import body_in_turn
from agl.trainer.http.errors import describe_error, error_handlers
from agl.trainer.http.limits import Refused
from agl.trainer.http.numbers import number_of  # also for the routes
from agl.trainer.http.responses import answer
from agl.trainer.http.turns import Turns
from agl.trainer.report.alerts import Watch
from agl.trainer.report.labels import label
from agl.trainer.report.rollout_report import describe
from agl.trainer.run.about import LONGEST, about, note, request_stop, shown, stop_requested
from agl.trainer.run.candidates import candidates
from agl.trainer.store.base import Runs, Store
from agl.trainer.store.types import ROLLOUT_TERMINAL, Mode, Rollout, RolloutStatus, RolloutSummary, TrainingRun

STATIC = Path(__file__).with_name("static")
_TYPES = {".js": "text/javascript", ".json": "application/json", ".html": "text/html", ".css": "text/css"}
# Inline scripts and styles are not allowed, nothing comes from or goes to another host, no page may frame this one, and
# no text becomes HTML: Chromium then throws where a script tries.
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_LONGEST_ID = 200
PAGE = 100
MOST_ROLLOUTS = 512
"""Runs and rollouts of one answer."""
MOST_CANDIDATES = 1_000
"""Of a prompt search."""
MOST_MEMORIES = 100
_METRIC_VALUES = 100_000
_MOST_NAMES = 50
_ENDS = ("val/reward", "train/reward")
"""The metrics whose first and last values the list of runs shows."""
_GAP = 20
"""Steps without rollouts that are looked past for the next one with some."""
_AT_ONCE = 4
"""Reports that are made at the same time, each on a thread."""
_CHANGES_BYTES = 1024 * 1024
"""Of a request that changes a note or a label."""

ENDPOINTS = {"/metrics": "Training metrics", "/agents": "Active agents", "/memory": "Memory statistics"}


def dashboard_app(sources: Sequence[Source], keys: Keys) -> ASGIApp:
    """The application.

    Args:
        sources: the stores that it shows; their owner closes them.
        keys: whose operator may read them.
    """
    api = _Api(sources, keys)
    step = "/api/{store:number}/runs/{run}/steps/{mode}/{step:number}"
    routes = [
        Route("/", api.root),
        Route("/static/{path:path}", _file),
        Route("/api/stores", api.with_key(api.stores)),
        Route("/api/runs", api.with_key(api.runs)),
        Route("/api/compare", api.with_key(api.compare)),
        Route("/api/{store:number}/runs/{run}", api.with_key(api.run)),
        Route("/api/{store:number}/runs/{run}/metrics", api.with_key(api.metrics)),
        Route("/api/{store:number}/runs/{run}/now", api.with_key(api.now)),
        Route("/api/{store:number}/runs/{run}/prompts", api.with_key(api.prompts)),
        Route("/api/{store:number}/runs/{run}/memory", api.with_key(api.memory)),
        Route("/api/{store:number}/runs/{run}/about", api.with_key(api.note), methods=["POST"]),
        Route("/api/{store:number}/runs/{run}/stop", api.with_key(api.stop), methods=["POST"]),
        Route("/api/{store:number}/runs/{run}/search", api.with_key(api.search)),
        Route(step, api.with_key(api.step)),
        Route("/api/{store:number}/rollouts", api.with_key(api.rollouts)),
        Route("/api/{store:number}/rollouts/{rollout}", api.with_key(api.rollout)),
        Route("/api/{store:number}/rollouts/{rollout}/group", api.with_key(api.group)),
        Route("/api/{store:number}/rollouts/{rollout}/label", api.with_key(api.label), methods=["POST"]),
        Route("/api/{store:number}/runners", api.with_key(api.runners)),
        Route("/metrics", api.with_key(api.guide_metrics)),
        Route("/agents", api.with_key(api.guide_agents)),
        Route("/memory", api.with_key(api.guide_memory)),
        Route("/metrics/update", api.update, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers(_describe, AglError, HTTPException))
    return _WithHeaders(app)


def ui_routes(store: Store, name: str, keys: Keys) -> list[BaseRoute]:
    """The dashboard of one open store below `/ui` of another server; `name` is what the page calls the store."""
    return [Mount("/ui", app=dashboard_app([Source(name, store=store)], keys))]


class _WithHeaders:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                if not any(name.lower() == b"cache-control" for name, _ in message.get("headers", ())):
                    added.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self.app(scope, receive, with_headers)


def _describe(request: Request, error: Exception) -> tuple[dict[str, Any], int]:
    body, status = describe_error(request, error)
    if isinstance(error, NotStoredError):
        status = 404
    elif isinstance(error, ConfigError):
        status = 400
    elif isinstance(error, HTTPException) and not isinstance(error, Refused):
        body["error"]["hint"] = "the page is at /"
    return {"error": views.shown(body["error"])}, status


def _file(request: Request, path: str | None = None) -> Response:
    path = path or request.path_params["path"]
    if path not in _files():
        raise HTTPException(404, "there is no such file")
    content, kind, tag = _files()[path]
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)


@functools.cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """The page's files by their path below `STATIC`: content, media type, tag."""
    files = {}
    for file in STATIC.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "text/plain"
            files[file.relative_to(STATIC).as_posix()] = content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return files


Handler = Callable[[Request], Awaitable[Any]]


class _Api:
    """The JSON API."""

    def __init__(self, sources: Sequence[Source], keys: Keys) -> None:
        self._sources = sources
        self._keys = keys
        self._reports = asyncio.Semaphore(_AT_ONCE)
        self._turns = Turns()

    def with_key(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs a key and answers with the handler's value."""

        @functools.wraps(handler)
        async def handle(request: Request) -> Response:
            self._check(request)
            return answer(await handler(request))

        return handle

    async def _changes(self, request: Request) -> dict[str, Any]:
        """What a request wants changed."""
        async with body_in_turn(request, self._turns, most=_CHANGES_BYTES) as body:
            changes = await body.json(depth=3)
        if not isinstance(changes, dict):
            raise Refused(400, "the body is an object of JSON", "invalid_request")
        return changes

    def _check(self, request: Request) -> None:
        role = self._keys.role(request.headers)
        if role is None:
            raise Refused(401, "open the link that was printed at the start: it has the key", "invalid_api_key")
        if role != "operator":
            raise Refused(403, f"a {role}'s key does not open the dashboard", "forbidden")

    async def root(self, request: Request) -> Response:
        """The page for browsers; for programs what the guide's dashboard answers."""
        accepted = request.headers.get("accept", "")
        if "application/json" not in accepted or "text/html" in accepted:
            return _file(request, "index.html")
        self._check(request)
        return answer({"status": "running", "metrics": await self.guide_metrics(request), "endpoints": ENDPOINTS})

    async def update(self, request: Request) -> Response:
        """The guide's route for writing metrics; it is refused, because training runs record them."""
        self._check(request)
        raise Refused(405, "metrics are read-only: every training run records its steps in the store", "read_only")

    # -- runs -----------------------------------------------------------------------------------------------------
    async def stores(self, _: Request) -> Any:
        return {"stores": [printable(source.name) for source in self._sources]}

    async def runs(self, request: Request) -> Any:
        """Runs of all stores, or of `store`, newest first; `older`: by store the run after which the rest begins. With
        `deleted` those that were deleted."""
        chosen = _number(request, "store", None, most=len(self._sources) - 1)
        numbers = range(len(self._sources)) if chosen is None else [chosen]
        after = _text(request, "after")
        deleted = bool(_number(request, "deleted", 0, most=1))
        pages = await asyncio.gather(*(self._runs(number, after, deleted) for number in numbers))
        return {
            # Each store has its own order, whatever its clock said; between stores the clocks are all that is known.
            "runs": list(heapq.merge(*(runs for runs, _, _ in pages), key=lambda r: -r["created_at"])),
            "stores": [facts for _, facts, _ in pages],
            "older": {number: older for number, (_, _, older) in zip(numbers, pages, strict=True) if older},
        }

    async def _runs(
        self, number: int, after: str | None, deleted: bool
    ) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
        facts: dict[str, Any] = {"store": number, "name": printable(self._sources[number].name), "error": None}
        try:
            store = await self._sources[number].store()
            page, notes = await asyncio.gather(store.query_runs(after=after, limit=PAGE), about(store))
            runs = shown(page, notes, deleted=deleted)
            ends = await store.query_metrics([r.run_id for r in runs], names=_ENDS, ends=True) if runs else []
        except AglError as error:
            # The other stores are shown.
            return [], {**facts, "error": views.shown({"message": error.message, "hint": error.hint})}, None
        rows = [
            views.run_json(r, [m for m in ends if m.run_id == r.run_id], notes.get(r.run_id)) | {"store": number}
            for r in runs
        ]
        return rows, facts, page[-1].run_id if len(page) == PAGE else None

    async def run(self, request: Request) -> Any:
        store, run = await self._run(request)
        ends = await store.query_metrics([run.run_id], names=_ENDS, ends=True)
        facts = {
            "store_name": printable(self._source(request).name),
            "stopping": await stop_requested(store, run.run_id),
        }
        return views.run_json(run, ends, (await about(store)).get(run.run_id)) | facts

    async def note(self, request: Request) -> Any:
        """Change what is noted on a run: "name", "tags", "note", "deleted"."""
        store, run = await self._run(request)
        return views.shown(asdict(await note(store, run.run_id, await self._changes(request))), views.SHORT_TEXT)

    async def stop(self, request: Request) -> Any:
        """Have the run end after its current step."""
        store, run = await self._run(request)
        await request_stop(store, run)
        return {"stopping": True}

    async def metrics(self, request: Request) -> Any:
        """Numbers of later steps than `after`, of `names` alone if they are given; `more` if there are further ones."""
        store, run = await self._run(request)
        after = _number(request, "after", None, least=-1)
        names = request.query_params.getlist("name")[:_MOST_NAMES] or None
        metrics = await store.query_metrics([run.run_id], names=names, after_step=after, limit=_METRIC_VALUES)
        more = len(metrics) == _METRIC_VALUES
        if more:
            # The last step may be cut in two.
            metrics = [m for m in metrics if m.step < metrics[-1].step]
        return views.metric_columns(metrics) | {"more": more}

    async def now(self, request: Request) -> Any:
        """What looked wrong so far (`alerts`), and the worst, the median and the best rollout of the last step by their
        reward (`samples`), with the last answer of each."""
        store, run = await self._run(request)
        watch = Watch()
        entries = defaultdict[int, dict[str, Any]](dict)
        for metric in await store.query_metrics([run.run_id], names=views.alert_names(run), limit=_METRIC_VALUES):
            entries[metric.step][metric.name] = metric.value
        for step in sorted(entries):
            watch.add({"step": step, **entries[step]})
        step = run.step - 1
        summaries = await store.query_step(run.run_id, step, mode="train", limit=MOST_ROLLOUTS) if step >= 0 else []
        rated = sorted((s for s in summaries if s.reward is not None), key=lambda s: s.reward or 0.0)
        chosen = {name: rated[i] for name, i in (("best", -1), ("median", len(rated) // 2), ("worst", 0)) if rated}

        async def samples() -> list[dict[str, Any]]:
            described = {name: await describe(store, s.rollout.rollout_id) for name, s in chosen.items()}
            return [views.sample_json(name, chosen[name], report) for name, report in described.items()]

        async with self._reports:
            return {
                "alerts": views.shown([asdict(alert) for alert in watch.alerts[::-1]], views.SHORT_TEXT),
                "samples": await asyncio.to_thread(asyncio.run, samples()),
                "step": step,
            }

    async def prompts(self, request: Request) -> Any:
        """The candidates of a prompt search; of `candidate` also what its texts changed `against` another one."""
        store, run = await self._run(request)
        found = await candidates(store, run.run_id)
        facts = {
            "candidates": views.shown([asdict(c) | {"texts": None} for c in found[:MOST_CANDIDATES]], views.SHORT_TEXT)
        }
        number = _number(request, "candidate", None, most=max(0, len(found) - 1))
        if number is None or not found:
            return facts
        against = _number(request, "against", number, most=len(found) - 1)
        async with self._reports:
            return facts | await asyncio.to_thread(views.changes_json, found[against or 0], found[number])

    async def memory(self, request: Request) -> Any:
        """What a run's agents remember: the newest entries, or those with a word of `text`, best first; and how many
        there are."""
        store, run = await self._run(request)
        entries = await store.query_memories(run.run_id)
        found = entries[::-1]
        text = _text(request, "text")
        if text:
            by_id = {entry.id: entry for entry in entries}
            found = [by_id[id] for id, _ in await store.rank_memories(run.run_id, text) if id in by_id]
        rows = [asdict(replace(entry, embedding=None)) for entry in found[:MOST_MEMORIES]]
        return {"total": len(entries), "found": len(found), "entries": views.shown(rows, views.SHORT_TEXT)}

    async def step(self, request: Request) -> Any:
        """One step's rollouts by group; `total` of them, `next` to continue `after`, and the steps `around` it."""
        store, run = await self._run(request)
        mode = _mode(request.path_params["mode"])
        step = request.path_params["step"]
        limit = _number(request, "limit", 256, least=1, most=MOST_ROLLOUTS)
        assert limit is not None
        summaries = await store.query_step(run.run_id, step, mode=mode, after=_text(request, "after"), limit=limit)

        async def neighbour(by: int) -> int | None:
            """The nearest step before or after this one that has rollouts: a search also has steps without."""
            for other in range(step + by, step + by * (_GAP + 1), by):
                if not 0 <= other <= run.step:
                    break
                if await store.count_rollouts(run_id=run.run_id, step=other, mode=mode):
                    return other
            return None

        return {
            "rollouts": [views.summary_json(summary) for summary in summaries],
            "total": await store.count_rollouts(run_id=run.run_id, step=step, mode=mode),
            "around": [await neighbour(-1), await neighbour(1)],
            "next": summaries[-1].rollout.rollout_id if len(summaries) == limit else None,
        }

    async def search(self, request: Request) -> Any:
        """Rollouts of all steps that match the conditions, newest first; `next` to continue `before`."""
        store, run = await self._run(request)
        summaries = await store.find_rollouts(
            run.run_id,
            mode=_mode(request.query_params.get("mode", "train")),
            text=request.query_params.get("text", "")[:LONGEST] or None,
            agent=request.query_params.get("agent", "")[:LONGEST] or None,
            tool=request.query_params.get("tool", "")[:LONGEST] or None,
            failed=bool(_number(request, "failed", 0, most=1)),
            least=_decimal(request, "least"),
            most=_decimal(request, "most"),
            before=_text(request, "before"),
            limit=PAGE,
        )
        return {
            "rollouts": [views.summary_json(summary) for summary in summaries],
            "next": summaries[-1].rollout.rollout_id if len(summaries) == PAGE else None,
        }

    # -- rollouts -------------------------------------------------------------------------------------------------
    async def rollouts(self, request: Request) -> Any:
        """Rollouts that programs recorded (`agl run`) and dry runs, which are no training's; the newest first."""
        store = await self._store(request)
        mode = _mode(request.query_params.get("mode", "collect"))
        now = datetime.now(UTC).timestamp()
        for days in (1, 30, None):
            since = None if days is None else now - days * 86400
            total = await store.count_rollouts(mode=mode, since=since)
            if total >= PAGE or days is None:
                break
        rollouts = await store.query_rollouts(mode=mode, since=since, limit=2_000)
        return {"rollouts": [views.rollout_json(r, views.SHORT_TEXT) for r in rollouts[::-1]][:PAGE], "total": total}

    async def rollout(self, request: Request) -> Any:
        """A rollout: as stored, its attempts, and the report on one of them from `call` and `token` on."""
        store = await self._store(request)
        rollout = await store.get_rollout(_id(request.path_params["rollout"]))
        attempts = await store.query_attempts(rollout.rollout_id)
        facts = {
            "rollout": views.rollout_json(rollout),
            "attempts": [views.attempt_json(attempt) for attempt in attempts],
            "attempt": None,
            "pruned": not attempts and rollout.status in ROLLOUT_TERMINAL,
            "siblings": [summary.rollout.rollout_id for summary in await _group(store, rollout)],
        }
        if not attempts:
            trained = await store.query_trained_calls(rollout.rollout_id)
            return facts | {"trained": [views.trained_json(t) for t in trained]}
        attempt = _number(request, "attempt", None, least=1) or attempts[-1].attempt
        first = _number(request, "call", 0) or 0, _number(request, "token", 0) or 0

        async def report() -> dict[str, Any]:
            described = await describe(store, rollout.rollout_id, attempt=attempt)
            spans = await store.query_spans(rollout.rollout_id, attempt)
            return views.report_json(described, completed(spans, [call.call for call in described.calls]), first)

        # Decoding thousands of tokens would block this server's other requests.
        async with self._reports:
            return {**facts, "attempt": attempt, **await asyncio.to_thread(asyncio.run, report())}

    async def group(self, request: Request) -> Any:
        """The rollouts of this one's group."""
        store = await self._store(request)
        rollout = await store.get_rollout(_id(request.path_params["rollout"]))
        if not (summaries := await _group(store, rollout)):
            raise StoreError("the rollout belongs to no step of a run", rollout=rollout.rollout_id)
        return {"group": printable(rollout.group), "rollouts": [views.summary_json(summary) for summary in summaries]}

    async def label(self, request: Request) -> Any:
        """Label a rollout with "value", a number or null to withdraw the label, and a "note"."""
        store = await self._store(request)
        changes = await self._changes(request)
        value = changes.get("value")
        text = changes.get("note")
        if not (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
            raise Refused(400, "the value is a number, or null to withdraw the label", "invalid_request")
        if not (text is None or isinstance(text, str)):
            raise Refused(400, "the note is a text", "invalid_request")
        labeled = await label(store, _id(request.path_params["rollout"]), value, note=(text or "")[:LONGEST] or None)
        return {"rollout_id": printable(labeled)}

    # -- more -----------------------------------------------------------------------------------------------------
    async def runners(self, request: Request) -> Any:
        """What every runner is doing: the open attempts, of the oldest rollout first, by worker."""
        store = await self._store(request)
        attempts = await store.query_open_attempts(limit=1000)
        workers: dict[str, list[Any]] = {}
        for attempt in attempts:
            workers.setdefault(printable(attempt.worker_id or ""), []).append(views.attempt_json(attempt))
        return {
            "workers": [{"worker": worker, "attempts": several} for worker, several in workers.items()],
            "waiting": await store.count_rollouts(status=["queuing"]),
            "complete": len(attempts) < 1000,
            "now": datetime.now(UTC).timestamp(),
        }

    async def compare(self, request: Request) -> Any:
        """Two runs, or two validations of one: `a` and `b` are STORE:RUN, `a_step` and `b_step` validations."""
        sides = []
        for name in ("a", "b"):
            text, _, run_id = (_text(request, name) or "").partition(":")
            number = number_of(text)
            if number is None or number >= len(self._sources) or not run_id:
                raise Refused(400, f"{name} is not STORE:RUN", "invalid_request")
            store = await self._sources[number].store()
            run = await _find_run(store, _id(run_id))
            sides.append(Validation(store, run, _number(request, f"{name}_step", None)))
        # The test of thousands of tasks takes seconds.
        async with self._reports:
            return views.shown(await asyncio.to_thread(asyncio.run, compare(*sides)))

    # -- the guide's endpoints ------------------------------------------------------------------------------------
    async def guide_metrics(self, _: Request) -> dict[str, Any]:
        """Metrics of the newest run; running ones come first."""
        newest = await self._newest()
        if newest is None:
            return {
                "training_iterations": 0,
                "average_reward": 0.0,
                "active_agents": [],
                "memory_size": 0,
                "last_update": None,
            }
        store, run = newest
        ends = await store.query_metrics([run.run_id], names=["train/reward"], ends=True)
        return {
            "run_id": printable(run.run_id),
            "training_iterations": run.step,
            "average_reward": ends[-1].value if ends else None,
            "active_agents": [agent["agent"] for agent in await _agents(store, run)],
            "memory_size": await store.count_rollouts(),
            "last_update": datetime.fromtimestamp(run.updated_at, UTC).isoformat(),
        }

    async def guide_agents(self, _: Request) -> dict[str, Any]:
        newest = await self._newest()
        return {"agents": [] if newest is None else await _agents(*newest)}

    async def guide_memory(self, _: Request) -> dict[str, Any]:
        stores = []
        for source in self._sources:
            store = await source.store()
            counts = {status: await store.count_rollouts(status=[status]) for status in get_args(RolloutStatus)}
            stores.append({"store": printable(source.name), "rollouts": await store.count_rollouts(), **counts})
        return {"memory_size": sum(s["rollouts"] for s in stores), "stores": stores}

    async def _newest(self) -> tuple[Store, TrainingRun] | None:
        newest: list[tuple[Store, TrainingRun]] = []
        for source in self._sources:
            store = await source.store()
            newest += [(store, run) for run in await store.query_runs(limit=1)]
        return max(newest, key=lambda found: (found[1].status == "running", found[1].updated_at), default=None)

    # -- what requests name ---------------------------------------------------------------------------------------
    def _source(self, request: Request) -> Source:
        number = request.path_params["store"]
        if number >= len(self._sources):
            raise NotStoredError(f"there is no store {number}", hint="the page lists them")
        return self._sources[number]

    async def _store(self, request: Request) -> Store:
        return await self._source(request).store()

    async def _run(self, request: Request) -> tuple[Store, TrainingRun]:
        store = await self._store(request)
        return store, await _find_run(store, _id(request.path_params["run"]))


async def _find_run(store: Runs, run_id: str) -> TrainingRun:
    runs = await store.query_runs(run_ids=[run_id], limit=1)
    if not runs:
        raise NotStoredError(
            "there is no such run in this store", hint="the list of runs is the first page", run=run_id
        )
    return runs[0]


async def _group(store: Runs, rollout: Rollout) -> list[RolloutSummary]:
    """The rollouts of its group; none where it belongs to no step of a run."""
    if rollout.run_id is None or rollout.step is None:
        return []
    return await store.query_step(
        rollout.run_id, rollout.step, mode=rollout.mode, group=rollout.group, limit=MOST_ROLLOUTS
    )


async def _agents(store: Runs, run: TrainingRun) -> list[dict[str, Any]]:
    """The agents of the newest step that has any: their rollouts and mean reward."""
    rewards: dict[str, list[float]] = {}
    for step in (run.step, run.step - 1):
        for summary in await store.query_step(run.run_id, step, limit=256) if step >= 0 else ():
            for agent in summary.agents:
                rewards.setdefault(printable(agent), []).extend([] if summary.reward is None else [summary.reward])
        if rewards:
            break
    return [
        {"agent": agent, "rollouts": len(values), "average_reward": sum(values) / len(values) if values else None}
        for agent, values in sorted(rewards.items())
    ]


def _id(text: str) -> str:
    if not text or len(text) > _LONGEST_ID:
        raise Refused(400, f"an id has 1 to {_LONGEST_ID} characters", "invalid_request")
    return text


def _decimal(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    try:
        number = None if not text else float(text[:30])
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise Refused(400, f"{name} is a number", "invalid_request")
    return number


def _mode(text: str) -> Mode:
    if text not in get_args(Mode):
        raise Refused(400, f"mode is one of {', '.join(get_args(Mode))}", "invalid_request")
    return text  # type: ignore[return-value]


def _text(request: Request, name: str) -> str | None:
    text = request.query_params.get(name)
    return None if text is None else _id(text)


def _number(request: Request, name: str, default: int | None, *, least: int = 0, most: int = 2**31 - 1) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        number = int(text[:12])
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise Refused(400, f"{name} is a number from {least} to {most}", "invalid_request")
    return number
