"""A model that scores what another one sampled: loaded here, or on a server elsewhere.

Invariant: it shares the student's tokenizer; another one is refused before anything is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agl.errors import ConfigError
from agl.mdp.sequence import TrainingRow
from agl.mdp.types import FloatArray
from agl.trainer.engines.base import ServedModel
from agl.trainer.local.policy import LocalPolicy, OnProgress, PolicySpec
from agl.trainer.local.prepared import model_directory
from agl.trainer.local.tokenizer import PROBE, load_tokenizer

REQUESTS = 32
"""Texts that a server scores at once."""


class Teacher:
    """Made by `start`, ended by `close`.

    Args:
        name: of the teacher, for people.
        model: what computes.
    """

    def __init__(self, name: str, model: LocalPolicy | ServedModel) -> None:
        self.name = name
        self._model = model
        self._requests = asyncio.Semaphore(REQUESTS)

    @classmethod
    async def start(
        cls,
        teacher: str | Path | ServedModel,
        student: LocalPolicy,
        spec: PolicySpec,
        on_progress: OnProgress = lambda text: None,
    ) -> Teacher:
        """Load the teacher, or connect to it.

        Args:
            teacher: a Hugging Face directory or hub id, the directory of a run or checkpoint, or a server.
            student: whose tokens it scores.
            spec: how to load it; its model is not read.
            on_progress: called with what is being loaded.

        Raises:
            ConfigError: it has a different tokenizer from the student, or a shorter context.
            ModelLoadError, EngineError: nothing is left running then.
        """
        if not isinstance(teacher, str | Path):
            try:
                await teacher.connect()
                await _check_server(teacher, student)
            except BaseException:
                await teacher.close()
                raise
            return cls(repr(teacher), teacher)
        directory = await asyncio.to_thread(model_directory, str(teacher))
        await asyncio.to_thread(_check_tokenizer, directory, student.spec.model)
        policy = await LocalPolicy.start(
            replace(spec, model=directory, name="teacher", trained=False), on_progress=on_progress
        )
        if policy.max_context < student.max_context:
            await policy.close()
            raise _too_short(directory, policy.max_context, student, policy.max_context)
        return cls(directory, policy)

    async def logprobs(self, rows: Seq[TrainingRow]) -> list[FloatArray]:
        """float32 [T] per row: log-probs of the trained tokens, each in its own context; 0 elsewhere.

        Raises:
            EngineError: it failed.
        """
        if isinstance(self._model, LocalPolicy):
            return await self._model.sequence_logprobs(rows) if rows else []
        return list(await asyncio.gather(*(self._ask(row) for row in rows)))

    async def close(self) -> None:
        """End its process, or its connections."""
        await self._model.close()

    async def _ask(self, row: TrainingRow) -> FloatArray:
        assert not isinstance(self._model, LocalPolicy)
        values_T = np.zeros(len(row), np.float32)
        for path in _paths(row):
            async with self._requests:
                logprobs = await self._model.prompt_logprobs(row.token_ids[path])
            values_T[path[1:]] = logprobs
        return np.where(row.action_mask, values_T, np.float32(0))


def _paths(row: TrainingRow) -> list[np.ndarray]:
    """Contexts, as row indices from a first token on, in which every trained token of the row occurs."""
    left = row.action_mask.copy()
    paths = []
    while left.any():
        # The last one: nothing continues after it.
        at = int(np.flatnonzero(left)[-1])
        path = []
        while at >= 0:
            path.append(at)
            at = int(row.parents[at])
        paths.append(np.array(path[::-1]))
        left[path] = False
    return paths


def _check_tokenizer(teacher: str, student: str) -> None:
    """Refuse a teacher that has other ids for the student's tokens, or cuts texts differently."""
    ours = load_tokenizer(student)
    theirs = load_tokenizer(teacher)
    known: dict[str, int] = theirs.get_vocab()
    different = sorted((i, token) for token, i in ours.get_vocab().items() if known.get(token) != i)
    if different:
        i, token = different[0]
        what = f"{token!r} is {i} there and {known[token]} here" if token in known else f"it does not know {token!r}"
        raise _other_tokenizer(teacher, student, f"{len(different)} of {len(ours)} tokens are others, {what}")
    _compare(_encode(ours, PROBE), _encode(theirs, PROBE), teacher, student)


async def _check_server(engine: ServedModel, student: LocalPolicy) -> None:
    if engine.max_context <= student.max_context:
        # It wants room for a token after the text.
        raise _too_short(repr(engine), engine.max_context, student, engine.max_context - 1)
    tokenizer = await asyncio.to_thread(load_tokenizer, student.spec.model)
    text = PROBE + "".join(tokenizer.all_special_tokens)
    theirs = await engine.tokenize(text)
    if theirs is not None:
        _compare(_encode(tokenizer, text), theirs, repr(engine), student.spec.model)


def _compare(ours: list[int], theirs: list[int], teacher: str, student: str) -> None:
    if ours != theirs:
        raise _other_tokenizer(teacher, student, f"a probe text is {len(theirs)} tokens there and {len(ours)} here")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _other_tokenizer(teacher: str, student: str, what: str) -> ConfigError:
    return ConfigError(
        f"the teacher {teacher} has a different tokenizer from the student {student}: {what}",
        hint="choose a teacher of the student's family, or imitate recorded answers of "
        "this one with agl.SFT(data=agl.traces(...)), which tokenises them again",
    )


def _too_short(teacher: str, context: int, student: LocalPolicy, most: int) -> ConfigError:
    return ConfigError(
        f"the teacher {teacher} reads {context} tokens at most, and the student's conversations may have "
        f"{student.max_context}",
        hint=f"set max_context={most}",
    )
