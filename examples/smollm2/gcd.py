"""The agent of `arithmetic` on another kind of question: the greatest common divisor of two numbers."""

from __future__ import annotations

import argparse

from examples.smollm2 import arithmetic
from examples.smollm2.recipe import Claim


def claim(options: argparse.Namespace) -> Claim:
    """Questions to train on, and others to measure with."""
    return arithmetic.claim(options, "gcd")
