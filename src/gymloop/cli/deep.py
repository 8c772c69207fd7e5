"""What ``gymloop check --deep`` asks of the model's tokenizer and the environments, without starting a run.

The only part of ``check`` that imports transformers, the user's environments and parser plug-ins. Rows are made or read
as a run would, every one of them is rendered, and what does not fit is said in one sentence.
"""

from __future__ import annotations

from gymloop.config.plan import Plan
from gymloop.gym.contract import Row
from gymloop.gym.items import chat_tools
from gymloop.gym.rows import first_prompt, rows_beyond_context
from gymloop.gym.sources import build_sources, load_source_rows, shown_tools


def check_deeply(plan: Plan) -> int:
    """Print one line for each finding; 2 when one of them is an error.

    Raises:
        ConfigError: the tokenizer, an environment, a plug-in or the rows cannot be loaded.
    """
    from gymloop.models.resolve import resolve_model
    from gymloop.tokens.folder import generation_end_ids
    from gymloop.tokens.probe import probe
    from gymloop.tokens.renderer import Renderer
    from gymloop.tokens.reply import reply_reader

    recipe = plan.recipe
    tokenizer = recipe.policy.tokenizer
    reader = reply_reader(
        tokenizer.tool_parser, plan.tool_parser_plugin, tokenizer.reasoning_parser, plan.reasoning_parser_plugin
    )
    sources = build_sources(recipe.env, plan.recipe_path.parent)
    train = load_source_rows(recipe.data.train, sources, plan.recipe_path.parent)
    validation: list[Row] = []
    if recipe.data.validation is not None:
        validation = load_source_rows(recipe.data.validation, sources, plan.recipe_path.parent)

    key = "policy.model_name" if tokenizer.name is None else "policy.tokenizer.name"
    folder = resolve_model(tokenizer.name or recipe.policy.model_name, key=key)
    ends = recipe.policy.generation.stop_token_ids
    renderer = Renderer.load(folder, plan.chat_template, tokenizer.chat_template_kwargs, ends, reader)
    tools = shown_tools(sources, [*train, *validation])
    findings = [
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
