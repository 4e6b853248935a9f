"""0.3's package `store`: the stores, and the server that serves one."""

from agl_agentlightning.lightning_store import *  # noqa: F403
from agl_agentlightning.store_server import LightningStoreServer as LightningStoreServer
