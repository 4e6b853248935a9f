"""JSON values that are changed anywhere in them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value and the keys in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield value, key
        yield from places(one)


def changed(value: Any, dice: random.Random, values: Sequence[Any]) -> Any:
    """A copy of a value with up to three changes anywhere in it.

    Args:
        values: what may take the place of another one.
    """
    value = copy.deepcopy(value)
    for _ in range(dice.randint(1, 3)):
        found = list(places(value))
        if not found:
            break
        container, key = dice.choice(found)
        match dice.randrange(5):
            case 0:
                del container[key]
            case 1:
                container[key] = [container[key]]
            case 2:
                container[key] = {"type": container[key]}
            case _:
                container[key] = copy.deepcopy(dice.choice(values))
    return value
