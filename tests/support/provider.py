"""`agl.testing.provider`, by the name that tests know it under."""

from agl.testing.provider import *  # noqa: F403
