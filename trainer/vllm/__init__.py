"""Any `vllm serve` as an engine, over HTTP."""

from agl.trainer.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
