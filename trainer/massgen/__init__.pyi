from agl.trainer.massgen.collector import AgentRun as AgentRun
from agl.trainer.massgen.collector import TraceCollector as TraceCollector
from agl.trainer.massgen.config import AlgorithmConfig as AlgorithmConfig
from agl.trainer.massgen.config import RLConfig as RLConfig
from agl.trainer.massgen.config import StoreConfig as StoreConfig
from agl.trainer.massgen.mixins import RLAgentMixin as RLAgentMixin
from agl.trainer.massgen.mixins import RLOrchestratorMixin as RLOrchestratorMixin
from agl.trainer.massgen.rewards import RewardComputer as RewardComputer
from agl.trainer.massgen.store import LightningStore as LightningStore
from agl.trainer.report.export.massgen import ContentSpan as ContentSpan
from agl.trainer.report.export.massgen import CoordinationSpan as CoordinationSpan
from agl.trainer.report.export.massgen import PromptSpan as PromptSpan
from agl.trainer.report.export.massgen import ReasoningSpan as ReasoningSpan
from agl.trainer.report.export.massgen import RewardSpan as RewardSpan
from agl.trainer.report.export.massgen import ToolSpan as ToolSpan
from agl.trainer.report.export.massgen import Trace as Trace
from agl.trainer.report.export.massgen import TraceSpan as TraceSpan
from agl.trainer.report.export.massgen import read_traces as read_traces

__all__: list[str]

def install() -> None: ...
