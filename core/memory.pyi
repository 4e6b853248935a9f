"""The names of `agl.memory`, for editors and type checkers; `memory.py` loads the same on first use."""

from agl.agents.memory import Hit as Hit
from agl.agents.memory import MemoryUse as MemoryUse
from agl.agents.memory import put as put
from agl.agents.memory import quoted as quoted
from agl.agents.memory import search as search
from agl.agents.memory import tools as tools
from agl.trainer.memory.memory import Memory as Memory
from agl.trainer.memory.ranking import Hybrid as Hybrid
from agl.trainer.memory.ranking import Rank as Rank
from agl_massgen.memory_manager import MemoryManager as MemoryManager

__all__: list[str]
