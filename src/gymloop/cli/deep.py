"""What ``gymloop check --deep`` asks of the engine, the tokenizer and the environments, without starting a run.

The only part of ``check`` that imports transformers, the user's environments and parser plug-ins. Rows are made or read
as a run would, every one of them is rendered, and what does not fit is said in one sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gymloop.config.parsers import settled_parsers
from gymloop.config.plan import Plan
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.contract import Row
from gymloop.gym.items import chat_tools
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.rows import first_prompt, rows_beyond_context
from gymloop.gym.sources import build_sources, load_source_rows, shown_tools

NOWHERE = "http://127.0.0.1:1"
"""For servers that do not run: of those only the names are asked for, which rows have to carry."""


def _running_agents(plan: Plan) -> Iterable[str]:
    """The agents of the NeMo Gym that the recipe attaches to, if it does."""
    from gymloop.gym.nemo.attach import attach_agents

    given = plan.recipe.env.nemo_gym
    return () if given is None or given.head_server_url is None else asyncio.run(attach_agents(given.head_server_url))


def check_deeply(plan: Plan, gym: Gym | None = None, engine_fault: str | None = None) -> int:
    """Print one line for each finding; 2 when one of them is an error.

    Args:
        plan: of the run.
        gym: what it starts of NeMo Gym.
        engine_fault: why its engine would not start with this Python, if so.

    Raises:
        ConfigError: the tokenizer, an environment, a plug-in or the rows cannot be loaded.
        InfraError: the NeMo Gym that the recipe attaches to does not answer.
    """
    from gymloop.models.resolve import resolve_model
    from gymloop.tokens.folder import generation_end_ids
    from gymloop.tokens.probe import probe
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import reply_reader

    recipe = plan.recipe
    tokenizer = recipe.policy.tokenizer
    sources = build_sources(recipe.env, plan.recipe_path.parent)
    agents = gym.plays if gym is not None else _running_agents(plan)
    sources |= {name: AttachedEnvironment(name, NOWHERE) for name in agents}
    train = load_source_rows(plan.train, sources, plan.recipe_path.parent)
    validation: list[Row] = []
    if plan.validation is not None:
        validation = load_source_rows(plan.validation, sources, plan.recipe_path.parent)

    key = "policy.model_name" if tokenizer.name is None else "policy.tokenizer.name"
    folder = resolve_model(tokenizer.name or recipe.policy.model_name, key=key)
    parsers = settled_parsers(recipe)
    reader = reply_reader(
        parsers.tool_parser, plan.tool_parser_plugin, parsers.reasoning_parser, plan.reasoning_parser_plugin, folder
    )
    ends = recipe.policy.generation.stop_token_ids
    renderer = Renderer.load(folder, plan.chat_template, tokenizer.chat_template_kwargs, ends, reader)
    tools = shown_tools(sources, [*train, *validation])
    findings = [] if engine_fault is None else [("error", engine_fault)]
    findings += [
        (finding.severity, finding.what)
        for finding in probe(renderer, generation_end_ids(folder) if ends is None else ends, chat_tools(tools))
    ]
    limit = recipe.policy.max_total_sequence_length
    for key, rows in (("train", train), ("validation", validation)):
        lengths = renderer.prompt_lengths([first_prompt(row) for row in rows])
        findings += [("error", f"data.{key}: {what}") for what in rows_beyond_context(rows, lengths, limit)]
    for severity, what in findings:
        print(f"  {severity:<11} {what}")
    errors = sum(severity == "error" for severity, _ in findings)
    rows_seen = f"{len(train)} training and {len(validation)} validation rows"
    print(f"  deep        {folder}: {rows_seen} rendered, {errors} errors, {len(findings) - errors} warnings")
    return 2 if errors else 0
