from agl_massgen.collector import AgentRun as AgentRun
from agl_massgen.collector import TraceCollector as TraceCollector
from agl_massgen.config import AlgorithmConfig as AlgorithmConfig
from agl_massgen.config import RLConfig as RLConfig
from agl_massgen.config import StoreConfig as StoreConfig
from agl_massgen.files import ContentSpan as ContentSpan
from agl_massgen.files import CoordinationSpan as CoordinationSpan
from agl_massgen.files import PromptSpan as PromptSpan
from agl_massgen.files import ReasoningSpan as ReasoningSpan
from agl_massgen.files import RewardSpan as RewardSpan
from agl_massgen.files import ToolSpan as ToolSpan
from agl_massgen.files import Trace as Trace
from agl_massgen.files import TraceSpan as TraceSpan
from agl_massgen.files import read_traces as read_traces
from agl_massgen.mixins import RLAgentMixin as RLAgentMixin
from agl_massgen.mixins import RLOrchestratorMixin as RLOrchestratorMixin
from agl_massgen.rewards import RewardComputer as RewardComputer
from agl_massgen.store import LightningStore as LightningStore

__all__: list[str]

def install() -> None: ...
