"""A model's strategy, read from its probabilities: exact, without a game being played."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.games.kuhn.agent import question
from examples.games.kuhn.rules import PLAYERS, SITUATIONS, Situation


def read_strategy(models: Mapping[str, str | Path]) -> dict[Situation, float]:
    """The probability of "bet" in each situation.

    Args:
        models: player -> its model's directory or hub id.
    """
    loaded = {str(path): _Model(str(path)) for path in models.values()}
    return {
        (card, history): loaded[str(models[PLAYERS[len(history) % 2]])].starts_with("bet", question(card, history))
        for card, history in SITUATIONS
    }


class _Model:
    def __init__(self, path: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path).float().eval()
        self.texts = [self.tokenizer.decode([i]).lower() for i in range(len(self.tokenizer))]

    def starts_with(self, word: str, messages: list[Any]) -> float:
        """How likely an answer is that starts with this word, in whatever case and after whatever white space: the sum
        over its tokenisations, but for those of less than a millionth."""
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer.encode(rendered, add_special_tokens=False)
        total = 0.0
        open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while open_:
            tokens, likely = open_.pop()
            said = "".join(self.texts[i] for i in tokens)
            with torch.no_grad():
                logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            for i, p in enumerate(torch.softmax(logits, 0)[: len(self.texts)].tolist()):
                text = (said + self.texts[i]).lstrip()
                if text.startswith(word):
                    total += likely * p
                elif word.startswith(text) and self.texts[i] and len(tokens) < len(word) and likely * p > 1e-6:
                    open_.append(((*tokens, i), likely * p))
        return total
