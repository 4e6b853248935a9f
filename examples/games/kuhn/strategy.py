"""A model's strategy, read from its probabilities: exact, without a game being played."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from examples.games.kuhn.agent import question
from examples.games.kuhn.rules import PLAYERS, SITUATIONS, Situation, Strategy
from transformers import AutoModelForCausalLM, AutoTokenizer


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


def average(strategies: list[Strategy]) -> dict[Situation, float]:
    """The strategy of one who draws one of these before each game and sticks to it.

    A situation counts by how likely the player itself makes it come about (Kuhn 1953, realisation equivalence).
    """
    weights = {
        (card, history): [1 - s[card, ()] if history == ("pass", "bet") else 1.0 for s in strategies]
        for card, history in SITUATIONS
    }
    return {
        x: sum(w * s[x] for w, s in zip(weights[x], strategies, strict=True)) / max(sum(weights[x]), 1e-12)
        for x in SITUATIONS
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
        total, open_ = 0.0, [((), 1.0)]
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
