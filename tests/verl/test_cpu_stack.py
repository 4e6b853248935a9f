"""The CPU plug-in below verl's trainer: new weights reach vLLM exactly, again and again; saved policies are copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from untrained import make_untrained
from verl_cpu.settings import environment

PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22], [30] * 17]


def run(program: str, *arguments: object) -> str:
    """A program in a process of its own, with the environment of a run: what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, **environment(), "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_vllm_takes_weights_again_and_again(tmp_path: Path) -> None:
    """By verl's own loading; what vLLM then gives are the log-probs of those weights."""
    program = """
        import asyncio, json, os, sys, threading
        import torch
        import verl
        from transformers import AutoModelForCausalLM
        from vllm import LLM, SamplingParams
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
        from verl_cpu.settings import vllm

        directory, prompts = sys.argv[1], json.loads(sys.argv[2])
        os.environ["VERL_RAY_JOB_ID"] = f"test-{os.getpid()}"  # part of the socket's name
        llm = LLM(
            directory, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**26,
            enable_prefix_caching=False,
            **vllm(),
        )
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")

        def send(weights):  # as the trainer's rank does it: through a segment of shared memory, in buckets
            sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
            asyncio.run(sender.async_send_weights(iter(weights)))

        (handle,) = llm.llm_engine.collective_rpc(lambda worker: worker._get_zmq_handle())
        worst = []
        for seed in range(3):
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            sending = threading.Thread(target=send, args=([(n, p.detach()) for n, p in model.named_parameters()],))
            sending.start()
            llm.llm_engine.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
            sending.join()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(max_tokens=8, temperature=1.0, logprobs=0, ignore_eos=True),
                use_tqdm=False,
            )
            for prompt, output in zip(prompts, outputs):
                ids = list(output.outputs[0].token_ids)
                served = torch.tensor([step[i].logprob for step, i in zip(output.outputs[0].logprobs, ids)])
                with torch.no_grad():
                    rows = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                worst.append((served - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]).abs().max().item())
        print("WORST", max(worst))
    """
    printed = run(program, make_untrained(tmp_path, head_dim=32), json.dumps(PROMPTS))  # vLLM's CPU attention has no 16
    assert float(printed.split("WORST")[1]) < 1e-4


def test_weights_travel_over_gloo() -> None:
    """From two trainer ranks, one of which only takes part in gathering, to two rollout ranks; twice."""
    program = """
        import asyncio, multiprocessing, sys
        import torch
        from verl_cpu.separate_async import Endpoint, GlooCheckpointEngine

        def weights(step):
            generator = torch.Generator().manual_seed(step)
            yield "matrix", torch.randn(5, 7, generator=generator).t()
            yield "scalar", torch.tensor(float(step))
            yield "half", torch.randn(3, generator=generator).to(torch.bfloat16)

        async def receive(engine):
            return {name: tensor async for name, tensor in engine.receive_weights()}

        def rollout(rank, endpoint, queue):
            engine = GlooCheckpointEngine(1 << 20)
            for step in (1, 2):
                engine.prepare()
                engine.init_process_group(rank, 3, endpoint)
                got = asyncio.run(receive(engine))
                engine.finalize()
                queue.put(all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
                              for name, tensor in weights(step)) and len(got) == 3)

        if __name__ == "__main__":
            master, idle = GlooCheckpointEngine(1 << 20, is_master=True), GlooCheckpointEngine(1 << 20)
            endpoint = master.prepare()
            actor, others = GlooCheckpointEngine.build_topology(2, 2, [endpoint, None, None, None])
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            children = [context.Process(target=rollout, args=(rank, endpoint, queue)) for rank in others["rank"]]
            for child in children:
                child.start()
            for step in (1, 2):
                for engine, rank in zip((master, idle), actor["rank"]):
                    engine.init_process_group(rank, actor["world_size"][0], endpoint)
                    walked = weights(step)
                    asyncio.run(engine.send_weights(walked))
                    assert next(walked, None) is None
                    engine.finalize()
            print("RIGHT", [queue.get(timeout=60) for _ in range(4)])
            for child in children:
                child.join()
    """
    assert run(program).strip().endswith("RIGHT [True, True, True, True]")


def test_a_saved_policy_does_not_change_with_the_model() -> None:
    program = """
        import os
        import torch
        import torch.distributed as dist
        import verl_cpu.separate_async
        from torch.distributed.fsdp import fully_shard
        from verl.utils import fsdp_utils

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("cpu:gloo,cpu:gloo")  # as verl asks for it
        model = fully_shard(torch.nn.Linear(3, 2))
        before = model.weight.full_tensor().clone()
        saved, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
        with torch.no_grad():
            model.weight.add_(1.0)
        fsdp_utils.fsdp2_sharded_load_from_cpu(model, saved, spec)
        print("SAME", torch.equal(model.weight.full_tensor(), before))
        dist.destroy_process_group()
    """
    assert "SAME True" in run(program)
