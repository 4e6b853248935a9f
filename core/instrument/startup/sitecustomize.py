"""Run by every Python under `agl run` before the program: switches tracing on, then runs the `sitecustomize` it hides.

An interpreter without agl continues unchanged; `agl run` then records its requests alone.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _chain() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _begin() -> None:
    try:
        from agl.instrument.auto import begin
    except ImportError:
        return
    begin()


try:
    _begin()
finally:
    _chain()
