"""The policy process: the same answers as the engine alone, errors that cross, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sampled_rows import sampled_rows
from tiny_engine import engine_for, sample, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from agl.errors import CheckpointError, ConfigError, ContextLengthError, EngineError, ModelLoadError
from agl.trainer.engines.base import Engine, Request, Sampling
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.policy import LocalPolicy, PolicySpec
from agl.trainer.processes.frames import FrameReader, to_frame

pytestmark = pytest.mark.usefixtures("executed_policies")

PROMPT = np.arange(40, 60, dtype=np.int32)
LONG = Sampling(max_tokens=4000, temperature=0.0)


def spec_for(directory: Path, **changes) -> PolicySpec:
    return PolicySpec(
        str(directory), **{"device": "cpu", "threads": 1, "learner": LearnerConfig(learning_rate=1e-2)} | changes
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def policy(runner, directory):
    policy = runner.run(LocalPolicy.start(spec_for(directory)))
    yield policy
    runner.run(policy.close())
    assert policy.process.returncode == 0


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process that is not our child ends within a bound."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def workers() -> set[str]:
    """The policy processes that this one has started."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {p for p in children if b"agl.trainer.local.worker" in Path(f"/proc/{p}/cmdline").read_bytes()}


async def new_worker(before: set[str]) -> str:
    """The policy process that was just started; a new process has no command line for a moment."""
    while not (new := workers() - before):
        await asyncio.sleep(0.01)
    return new.pop()


def test_the_parent_never_imports_torch():
    code = "import sys, agl.trainer.local.policy as p; p.PolicySpec('x'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_frames_survive_any_cut():
    messages = [PolicySpec("x"), [1, 2], "y" * 300]
    reader, seen = FrameReader(), []
    for byte in b"".join(map(to_frame, messages)):
        seen += reader.feed(bytes([byte]))
    assert seen == messages
    assert FrameReader().feed(b"".join(map(to_frame, messages))) == messages


@pytest.mark.night
def test_it_says_what_it_loaded(policy):
    assert isinstance(policy, Engine)
    assert (
        policy.info.parameters == policy.info.trainable_parameters == sum(p.numel() for p in tiny_model().parameters())
    )
    assert (policy.info.device, policy.info.dtype, policy.info.vocab_size) == ("cpu", "float32", 272)
    assert policy.info.stop_token_ids == (0,)
    assert policy.max_context == 4096


def test_answers_are_those_of_the_engine_alone(policy, runner):
    sampling = Sampling(max_tokens=12, seed=5)
    answer = runner.run(policy.generate(Request(PROMPT, sampling)))
    alone = sample(engine_for(tiny_model(), max_context=4096), PROMPT, sampling)
    assert answer.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)


def test_many_at_once_stream_their_own_tokens(policy, runner):
    async def one(i: int):
        seen: list[int] = []
        answer = await policy.generate(
            Request(PROMPT[: 1 + i], Sampling(max_tokens=3 + i, seed=i)), on_tokens=lambda ids, _: seen.extend(ids)
        )
        return seen, answer.token_ids.tolist()

    async def all_of_them():
        return await asyncio.gather(*(one(i) for i in range(16)))

    for i, (seen, tokens) in enumerate(runner.run(all_of_them())):
        assert seen == tokens
        assert len(tokens) == 3 + i


def test_engine_and_learner_agree_on_a_fixed_sequence(policy, runner):
    ids = np.arange(100, dtype=np.int32)
    served = runner.run(policy.engine_logprobs(ids, temperature=0.9))
    trained = runner.run(policy.logprobs(ids, temperature=0.9))
    assert served.dtype == trained.dtype == np.float32
    np.testing.assert_allclose(served, trained, atol=1e-4)


def test_cancelling_the_task_frees_the_engine(policy, runner):
    async def cancel():
        running = asyncio.Event()
        tasks = [
            asyncio.create_task(policy.generate(Request(PROMPT, LONG), on_tokens=lambda *_: running.set()))
            for _ in range(policy.spec.max_batch + 1)
        ]
        await running.wait()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, asyncio.CancelledError) for e in ended)
        return await policy.generate(Request(PROMPT, Sampling(max_tokens=2)))

    assert runner.run(cancel()).token_ids.size == 2
    assert not policy.process._peers[0]._calls


def test_a_callback_that_fails_fails_its_own_request(policy, runner):
    def broken(ids, logprobs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        runner.run(policy.generate(Request(PROMPT, LONG), on_tokens=broken))
    assert runner.run(policy.generate(Request(PROMPT, Sampling(max_tokens=2)))).token_ids.size == 2


def test_errors_cross_as_themselves(policy, runner):
    with pytest.raises(ContextLengthError, match="a prompt of 4096 tokens"):
        runner.run(policy.generate(Request(np.zeros(4096, np.int32), Sampling(max_tokens=1))))
    with pytest.raises(ConfigError, match="top_p=2"):
        runner.run(policy.generate(Request(PROMPT, Sampling(max_tokens=1, top_p=2.0))))
    with pytest.raises(EngineError, match=r"'other'.*\n.*'policy'"):
        runner.run(policy.generate(Request(PROMPT, Sampling(max_tokens=1), policy="other")))
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        runner.run(policy.load_state("/nowhere/state.pt"))
    with pytest.raises(EngineError, match="another event loop"):
        asyncio.run(policy.generate(Request(PROMPT, Sampling(max_tokens=1))))


def test_training_changes_what_is_served_and_state_restores_it_to_the_bit(policy, runner, tmp_path):
    async def story():
        ids = np.concatenate([PROMPT, np.arange(10, dtype=np.int32)])
        await policy.save_state(tmp_path / "state.pt")
        start = await policy.engine_logprobs(ids)
        data = await sampled_rows(policy, PROMPT, (1.0, -1.0))
        first = await policy.train(data)
        assert policy.version == 1
        trained = await policy.engine_logprobs(ids)
        np.testing.assert_allclose(trained, await policy.logprobs(ids), atol=1e-4)
        assert np.abs(trained - start).max() > 1e-3
        assert (await policy.generate(Request(PROMPT, Sampling(max_tokens=2)))).policy_version == 1
        await policy.load_state(tmp_path / "state.pt")
        assert policy.version == 0
        assert (await policy.engine_logprobs(ids)).tobytes() == start.tobytes()
        second = await policy.train(data)
        assert (await policy.engine_logprobs(ids)).tobytes() == trained.tobytes()
        assert first == second
        (tmp_path / "broken.pt").write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match="cannot be read"):
            await policy.load_state(tmp_path / "broken.pt")
        await policy.save_model(tmp_path / "model")
        return ids, trained

    ids, trained = runner.run(story())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    np.testing.assert_allclose(engine_for(model).logprobs(ids), trained, atol=1e-5)
    assert not list(tmp_path.glob("*.partial"))


def test_a_lora_policy_trains_its_adapter_alone(runner, directory, tmp_path):
    from agl.trainer.local.config import LoraSpec

    async def story():
        policy = await LocalPolicy.start(spec_for(directory, lora=LoraSpec(rank=4)))
        try:
            assert 0 < policy.info.trainable_parameters < policy.info.parameters / 2
            before = await policy.engine_logprobs(PROMPT)
            await policy.train(await sampled_rows(policy, PROMPT, (1.0, -1.0)))
            await policy.train(await sampled_rows(policy, PROMPT, (1.0, -1.0)))
            after = await policy.engine_logprobs(PROMPT)
            assert np.abs(after - before).max() > 1e-4
            np.testing.assert_allclose(after, await policy.logprobs(PROMPT), atol=1e-4)
            await policy.save_model(tmp_path / "model")
            return after
        finally:
            await policy.close()

    after = runner.run(story())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    np.testing.assert_allclose(engine_for(model).logprobs(PROMPT), after, atol=1e-4)


@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.night), 4])
def test_with_staleness_the_old_weights_are_served_until_the_new_ones_are_published(runner, directory, tmp_path, rank):
    from agl.trainer.local.config import LoraSpec

    async def story():
        policy = await LocalPolicy.start(
            spec_for(directory, max_staleness=1, lora=LoraSpec(rank=rank) if rank else None)
        )
        try:
            before = await policy.engine_logprobs(PROMPT)
            data = await sampled_rows(policy, PROMPT, (1.0, -1.0))
            begun = asyncio.Event()
            sampling = asyncio.ensure_future(
                policy.generate(Request(PROMPT, Sampling(max_tokens=300)), on_tokens=lambda *_: begun.set())
            )
            await begun.wait()
            for _ in range(2):
                await policy.train(data)
            during = await sampling
            assert (policy.version, during.policy_version) == (2, 0)
            assert (await policy.engine_logprobs(PROMPT)).tobytes() == before.tobytes()
            assert np.abs(await policy.logprobs(PROMPT) - before).max() > 1e-4
            ids = np.concatenate([PROMPT, during.token_ids])
            served = (await policy.engine_logprobs(ids))[PROMPT.size - 1 :]
            np.testing.assert_allclose(during.logprobs, served, atol=1e-4)

            await policy.save_state(tmp_path / "state.pt")
            await policy.publish()
            after = await policy.engine_logprobs(PROMPT)
            np.testing.assert_allclose(after, await policy.logprobs(PROMPT), atol=1e-4)
            assert (await policy.generate(Request(PROMPT, Sampling(max_tokens=2)))).policy_version == 2
            begun.clear()
            sampling = asyncio.ensure_future(
                policy.generate(Request(PROMPT, Sampling(max_tokens=300)), on_tokens=lambda *_: begun.set())
            )
            await begun.wait()
            await policy.train(data)
            await policy.publish()
            (_, older), (first, newer) = (await sampling).versions
            assert (older, newer) == (2, 3), "the answer went on under the new weights"
            assert first > 0
            await policy.load_state(tmp_path / "state.pt")
            assert (await policy.engine_logprobs(PROMPT)).tobytes() == after.tobytes()
        finally:
            await policy.close()

    runner.run(story())


def test_a_model_that_does_not_load_says_why(runner, tmp_path):
    with pytest.raises(ModelLoadError, match="nothing-here"):
        runner.run(LocalPolicy.start(spec_for(tmp_path / "nothing-here")))


@pytest.mark.night
def test_the_kind_of_attention_reaches_the_process(runner, directory):
    with pytest.raises(ConfigError, match="attention='flash'"):
        runner.run(LocalPolicy.start(spec_for(directory, attention="flash")))


def test_a_start_without_progress_ends_the_process(runner, directory):
    async def start():
        before = workers()
        with pytest.raises(EngineError, match=r"no progress for 0.01 s while it was loaded \(starting\)"):
            await LocalPolicy.start(spec_for(directory, load_timeout=0.01))
        assert workers() <= before

    runner.run(start())


def test_a_closed_policy_fails_what_waits_and_leaves_no_process(runner, directory, no_process_left):
    async def story():
        policy = await LocalPolicy.start(spec_for(directory, max_staleness=1))
        asleep = asyncio.create_task(policy.generate(Request(PROMPT, LONG)))
        await policy.generate(Request(PROMPT, Sampling(max_tokens=2)))
        await policy.close()
        with pytest.raises(EngineError, match="was closed"):
            await asleep
        assert policy.process.returncode == 0

    runner.run(story())


def test_a_child_that_dies_fails_every_waiting_call(runner, directory):
    async def story():
        policy = await LocalPolicy.start(spec_for(directory))
        tasks = [asyncio.create_task(policy.generate(Request(PROMPT, LONG))) for _ in range(3)]
        tasks.append(asyncio.create_task(policy.engine_logprobs(PROMPT)))
        await tasks[-1]
        os.kill(policy.process.pid, signal.SIGKILL)
        ended = await asyncio.gather(*tasks[:3], return_exceptions=True)
        for error in ended:
            assert isinstance(error, EngineError)
            assert "the policy process died (exit code -9)" in str(error)
        with pytest.raises(EngineError, match="exit code -9"):
            await policy.train([])
        await policy.close()
        await policy.close()
        with pytest.raises(EngineError):
            await policy.generate(Request(PROMPT, LONG))

    runner.run(story())


def test_a_killed_parent_leaves_no_process(directory):
    code = f"""
import asyncio, numpy as np
from agl.trainer.engines import Request, Sampling
from agl.trainer.processes.frames import FrameReader, to_frame
from agl.trainer.local.policy import LocalPolicy, PolicySpec

async def main():
    policy = await LocalPolicy.start(PolicySpec({str(directory)!r}, device="cpu", threads=1))
    print(policy.process.pid, flush=True)
    request = Request(np.arange(9), Sampling(max_tokens=4000))
    await policy.generate(request, on_tokens=lambda *_: print("busy", flush=True))

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "busy\n"
        os.kill(child, signal.SIGINT)
        parent.kill()
    assert gone(child)
