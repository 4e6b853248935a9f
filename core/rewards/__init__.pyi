"""The names of `agl.rewards`, for editors and type checkers; `__init__.py` loads the same on first use."""

from agl.rewards.emit import as_rewards as as_rewards
from agl.rewards.emit import emit_exception as emit_exception
from agl.rewards.emit import emit_message as emit_message
from agl.rewards.emit import emit_object as emit_object
from agl.rewards.emit import emit_reward as emit_reward
from agl.rewards.emit import operation as operation
from agl.rewards.graders.base import Grader as Grader
from agl.rewards.graders.code import PythonTests as PythonTests
from agl.rewards.graders.collaboration import Consensus as Consensus
from agl.rewards.graders.collaboration import Rounds as Rounds
from agl.rewards.graders.collaboration import TokenBudget as TokenBudget
from agl.rewards.graders.combine import Weighted as Weighted
from agl.rewards.graders.judge import LLMJudge as LLMJudge
from agl.rewards.graders.maths import MathAnswer as MathAnswer
from agl.rewards.graders.rank import RankJudge as RankJudge
from agl.rewards.graders.schema import JSONSchema as JSONSchema
from agl.rewards.graders.sql import SQLResult as SQLResult
from agl.rewards.graders.structure import Depth as Depth
from agl.rewards.graders.structure import Structure as Structure
from agl.rewards.graders.text import Contains as Contains
from agl.rewards.graders.text import ExactMatch as ExactMatch
from agl.rewards.graders.text import FuzzyMatch as FuzzyMatch
from agl.rewards.graders.text import RegexMatch as RegexMatch
from agl.rewards.graders.text import TokenF1 as TokenF1
from agl.rewards.graders.tools import RequiredTools as RequiredTools
from agl.rewards.graders.tools import ToolBudget as ToolBudget
from agl.rewards.graders.tools import ToolSuccess as ToolSuccess
from agl.rewards.trace import Trace as Trace
from agl.tracing import untrained as untrained

__all__: list[str]
