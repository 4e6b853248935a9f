# ruff: noqa: F403
from typing import Any

from agl.trainer.compat.adapter import *
from agl.trainer.compat.algorithm import *
from agl.trainer.compat.cli import lightning_cli as lightning_cli
from agl.trainer.compat.components import build_component as build_component
from agl.trainer.compat.emitter import *
from agl.trainer.compat.env_var import *
from agl.trainer.compat.execution import *
from agl.trainer.compat.legacy import *
from agl.trainer.compat.litagent import *
from agl.trainer.compat.llm_proxy import *
from agl.trainer.compat.logs import configure_logger as configure_logger
from agl.trainer.compat.logs import setup_logging as setup_logging
from agl.trainer.compat.logs import setup_module_logging as setup_module_logging
from agl.trainer.compat.missing import *
from agl.trainer.compat.otel_types import *
from agl.trainer.compat.prompts import *
from agl.trainer.compat.runner import *
from agl.trainer.compat.store import *
from agl.trainer.compat.store_server import *
from agl.trainer.compat.tracer import *
from agl.trainer.compat.trainer import *
from agl.trainer.compat.types import *
from agl.trainer.compat.utils import *

def install() -> None: ...
def __getattr__(name: str) -> Any: ...  # what agl has and 0.3 did not
