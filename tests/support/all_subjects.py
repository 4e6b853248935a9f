"""Every adapter under test; one whose framework is not installed is left out."""

from __future__ import annotations

from late import installed
from subject_ag2 import AG2, AG2Responses
from subject_agent_framework import AgentFramework, AgentFrameworkResponses
from subject_anthropic import BareAnthropic
from subject_autogen import AutoGen
from subject_crewai import CrewAI
from subject_google import BareGoogleGenAI
from subject_langchain import LangChainAnthropic, LangChainResponses
from subject_langgraph import LangGraph
from subject_openai import BareOpenAI, BareOpenAIResponses
from subject_openai_agents import OpenAIAgents, OpenAIAgentsResponses
from subject_pydantic_ai import PydanticAI, PydanticAIResponses
from subject_smolagents import Smolagents
from subject_strands import Strands
from subjects import LangChain

from agl.testing.subject import Subject

ALL: tuple[Subject, ...] = (
    BareOpenAI(),
    BareOpenAIResponses(),
    BareAnthropic(),
    BareGoogleGenAI(),
    LangChain(),
    LangChainResponses(),
    LangChainAnthropic(),
    LangGraph(),
    OpenAIAgents(),
    OpenAIAgentsResponses(),
    AgentFramework(),
    AgentFrameworkResponses(),
    Strands(),
    AutoGen(),
    AG2(),
    AG2Responses(),
    PydanticAI(),
    PydanticAIResponses(),
    Smolagents(),
    CrewAI(),
)


SUBJECTS = tuple(s for s in ALL if all(map(installed, s.requires)))
