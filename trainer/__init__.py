"""The trainer: everything between an agent's calls and a better policy."""

from agl._alias import register

register("agl.trainer.engine", "agl.trainer.engines")
register("agl.trainer.verl.short", "agl.trainer.verl.config.shorthand")
