"""The names of `agl.rewards`, for editors and type checkers; `__init__.py` loads the same on first use."""

from agl.rewards.emit import as_rewards as as_rewards
from agl.rewards.emit import emit_exception as emit_exception
from agl.rewards.emit import emit_message as emit_message
from agl.rewards.emit import emit_object as emit_object
from agl.rewards.emit import emit_reward as emit_reward
from agl.rewards.emit import operation as operation
from agl.rewards.files import read_text as read_text
from agl.rewards.trace import Trace as Trace
from agl.tracing import untrained as untrained
from agl.trainer.graders.base import Grader as Grader
from agl.trainer.graders.base import Weighted as Weighted
from agl.trainer.graders.code import PythonTests as PythonTests
from agl.trainer.graders.collaboration import Consensus as Consensus
from agl.trainer.graders.collaboration import Rounds as Rounds
from agl.trainer.graders.collaboration import TokenBudget as TokenBudget
from agl.trainer.graders.judge import LLMJudge as LLMJudge
from agl.trainer.graders.maths import MathAnswer as MathAnswer
from agl.trainer.graders.rank import RankJudge as RankJudge
from agl.trainer.graders.schema import JSONSchema as JSONSchema
from agl.trainer.graders.sql import SQLResult as SQLResult
from agl.trainer.graders.structure import Depth as Depth
from agl.trainer.graders.structure import Structure as Structure
from agl.trainer.graders.text import Contains as Contains
from agl.trainer.graders.text import ExactMatch as ExactMatch
from agl.trainer.graders.text import FuzzyMatch as FuzzyMatch
from agl.trainer.graders.text import RegexMatch as RegexMatch
from agl.trainer.graders.text import TokenF1 as TokenF1
from agl.trainer.graders.tools import RequiredTools as RequiredTools
from agl.trainer.graders.tools import ToolBudget as ToolBudget
from agl.trainer.graders.tools import ToolSuccess as ToolSuccess
from agl.trainer.processes.container import Container as Container

__all__: list[str]
