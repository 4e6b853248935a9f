"""The quickstart: arithmetic tasks, an agent that solves them with a calculator, and a tiny policy to train."""
