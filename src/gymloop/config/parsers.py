"""Which parsers a recipe names: gymloop says it under the tokenizer, NeMo RL under vLLM; the rules let one say it."""

from __future__ import annotations

from dataclasses import dataclass

from gymloop.config.schema import Recipe


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names and plug-in files, as the recipe has them.

    Attributes:
        tool_parser: always one.
        tool_parser_plugin: relative to the recipe.
        reasoning_parser: None leaves reasoning in the text.
        reasoning_parser_plugin: relative to the recipe.
    """

    tool_parser: str
    tool_parser_plugin: str | None
    reasoning_parser: str | None
    reasoning_parser_plugin: str | None


def settled_parsers(recipe: Recipe) -> Parsers:
    """What NeMo RL's keys say where they say something, else what the tokenizer's do."""
    own, cfg = recipe.policy.tokenizer, recipe.policy.generation.vllm_cfg
    if cfg is None:
        return Parsers(own.tool_parser, own.tool_parser_plugin, own.reasoning_parser, own.reasoning_parser_plugin)
    serving = cfg.http_server_serving_chat_kwargs
    return Parsers(
        serving.tool_parser or own.tool_parser,
        cfg.tool_parser_plugin or own.tool_parser_plugin,
        serving.reasoning_parser or own.reasoning_parser,
        cfg.reasoning_parser_plugin or own.reasoning_parser_plugin,
    )
