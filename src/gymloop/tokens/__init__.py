"""Conversations become tokens here, and nowhere else.

Three rules hold for every id list that leaves this package: text of a message can never become a control token, what
the model sampled is never tokenised again, and a prompt that cannot continue sampled ids exactly says so.
"""

from gymloop.tokens.bridge import BridgeError
from gymloop.tokens.conversation import ConversationError
from gymloop.tokens.divergence import Divergence
from gymloop.tokens.encoding import ControlTokenInInput
from gymloop.tokens.renderer import Renderer
from gymloop.tokens.reply import Reply, ReplyReader, reply_reader
from gymloop.tokens.tool_calls import ToolCall

__all__ = [
    "BridgeError",
    "ControlTokenInInput",
    "ConversationError",
    "Divergence",
    "Renderer",
    "Reply",
    "ReplyReader",
    "ToolCall",
    "reply_reader",
]
