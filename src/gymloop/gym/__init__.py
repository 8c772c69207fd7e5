"""The gym: environments, their tools, and the agents that play in them."""

from gymloop.gym.contract import Row, Session, SessionSource, Verdict
from gymloop.gym.environment import Call, Environment, call
from gymloop.gym.items import final_text
from gymloop.gym.tools import ToolError, tool

__all__ = [
    "Call",
    "Environment",
    "Row",
    "Session",
    "SessionSource",
    "ToolError",
    "Verdict",
    "call",
    "final_text",
    "tool",
]
