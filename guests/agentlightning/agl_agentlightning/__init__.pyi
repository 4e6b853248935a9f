# ruff: noqa: F403
from typing import Any

from agl_agentlightning.adapter import *
from agl_agentlightning.algorithm import *
from agl_agentlightning.cli import lightning_cli as lightning_cli
from agl_agentlightning.components import build_component as build_component
from agl_agentlightning.emitter import *
from agl_agentlightning.env_var import *
from agl_agentlightning.execution import *
from agl_agentlightning.legacy import *
from agl_agentlightning.lightning_store import *
from agl_agentlightning.litagent import *
from agl_agentlightning.llm_proxy import *
from agl_agentlightning.logs import configure_logger as configure_logger
from agl_agentlightning.logs import setup_logging as setup_logging
from agl_agentlightning.logs import setup_module_logging as setup_module_logging
from agl_agentlightning.missing import *
from agl_agentlightning.otel_types import *
from agl_agentlightning.prompts import *
from agl_agentlightning.runner import *
from agl_agentlightning.store_server import *
from agl_agentlightning.tracer import *
from agl_agentlightning.trainer import *
from agl_agentlightning.types import *
from agl_agentlightning.utils import *

def install() -> None: ...
def __getattr__(name: str) -> Any: ...  # what agl has and 0.3 did not
