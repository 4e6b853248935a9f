"""Rented sandboxes for graded programs, by the names that `PythonTests(isolation=)` knows."""

from agl_sandboxes._version import __version__ as __version__
from agl_sandboxes.daytona import Daytona as Daytona
from agl_sandboxes.e2b import E2B as E2B

NAMED = {sandbox.name: sandbox for sandbox in (E2B(), Daytona())}
"""What a name stands for; the same object each time, so that graders share its machines."""
