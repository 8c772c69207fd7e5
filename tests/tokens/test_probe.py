"""The start probe finds what does not fit and says it in one sentence; what fits is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymloop.tokens import Renderer
from gymloop.tokens.folder import generation_end_ids
from gymloop.tokens.probe import probe
from gymloop.tokens.reply import reply_reader
from toys import FAMILIES

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_tools.jinja"
TOOLS = [{"type": "function", "function": {"name": "wx", "parameters": {"type": "object", "properties": {}}}}]
QWEN = FAMILIES["q"].template


def findings(toy, family, template=None, tools=TOOLS, ends=None, **named):
    folder = toy(family)
    renderer = Renderer.load(folder, template, **named)
    found = probe(renderer, generation_end_ids(folder) if ends is None else ends, tools)
    assert all("\n" not in finding.what for finding in found if "writes a call as" not in finding.what)
    return [(finding.severity, finding.what) for finding in found]


def said(found, severity, *parts):
    return any(level == severity and all(part in what for part in parts) for level, what in found)


def test_a_model_whose_parts_fit_has_no_finding(toy):
    assert findings(toy, "q") == []
    assert findings(toy, "q", str(RECIPE)) == []


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.template])
def test_bridges_of_every_toy_are_the_templates(toy, family):
    assert not [what for _, what in findings(toy, family) if "bridge" in what]


def test_a_template_that_ignores_tools_is_an_error_only_where_there_are_tools(toy):
    assert said(findings(toy, "l"), "error", "ignores tools", "policy.tokenizer.chat_template")
    assert said(findings(toy, "l", tools=None), "warning", "ignores tools")


def test_a_template_may_show_some_tools_and_hide_another(toy):
    template = QWEN.replace("(tools | tojson)", "tools[0].function.name")
    two = [*TOOLS, {"type": "function", "function": {"name": "grep"}}]
    assert said(findings(toy, "q", template, two), "error", "does not show the tool 'grep'")


def test_calls_that_the_parser_does_not_read_are_an_error(toy):
    assert said(findings(toy, "m"), "error", "<function=probe_tool>", "reads no call", "tool_parser")
    other = QWEN.replace('"name": "', '"nom": "')
    assert said(findings(toy, "q", other), "error", "reads no call")
    assert said(findings(toy, "q", other, tools=None), "warning", "reads no call")


def test_arguments_that_do_not_survive_the_template_are_named(toy):
    # Quotes the text of an argument itself and forgets what JSON needs.
    template = QWEN.replace("(t.function.arguments | tojson)", "('{\"text\": \"' + t.function.arguments.text + '\"}')")
    found = findings(toy, "q", template)
    assert said(found, "warning", "hard arguments")
    assert not said(found, "error", "hard arguments")


def test_a_template_without_generation_prompt_is_a_warning(toy):
    assert said(findings(toy, "s"), "warning", "no generation prompt")


def test_reasoning_that_nobody_reads_is_a_warning(toy):
    assert said(findings(toy, "n"), "warning", "opens <think>", "reasoning_parser")
    assert not said(findings(toy, "n", reader=reply_reader(reasoning_parser="think")), "warning", "opens <think>")


def test_end_tokens_of_tokenizer_config_and_template_are_compared(toy):
    assert not said(findings(toy, "l"), "warning", "end token")
    found = findings(toy, "l", ends=(4,))
    assert said(found, "warning", "closes an assistant turn with '<|eot_id|>' (5)", "'<|eom_id|>' (4)")
    assert said(found, "warning", "the tokenizer's end token '<|end_of_text|>' (1)")
    assert said(findings(toy, "q", ends=(2, 999)), "error", "999")
    bare = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
    )
    assert said(findings(toy, "q", bare), "warning", "no end token")


def test_a_template_that_cannot_be_bridged_is_named(toy):
    # The header of every message counts the conversation.
    template = QWEN.replace("'<|im_start|>' + m.role", "'<|im_start|>' ~ (messages | length) ~ m.role")
    assert said(findings(toy, "q", template), "warning", "cannot be bridged", "new segment")


def test_a_bridge_that_is_not_the_templates_is_an_error_that_shows_both(toy):
    # A user turn is written differently behind the fixed base's user message than behind any other.
    template = QWEN.replace(
        "'<|im_start|>' + m.role + '\\n' + m.content",
        "'<|im_start|>' + m.role + ('!' if messages[0].content == 'x' and not loop.first else '') + '\\n' + m.content",
    )
    assert said(
        findings(toy, "q", template), "error", "a user message", "the template writes", "where the bridge writes"
    )


def test_a_template_that_cannot_render_tool_results_is_named(toy):
    assert said(findings(toy, "g"), "error", "cannot render a tool result", "alternate")
    assert said(findings(toy, "g", tools=None), "warning", "cannot render a tool result")


def test_a_template_that_fails_outright_is_one_error(toy):
    assert [level for level, _ in findings(toy, "q", "{{ raise_exception('no') }}")] == ["error"]


@pytest.mark.slow
def test_smollm2s_own_template_ignores_tools_and_the_recipes_does_not():
    from gymloop.models.resolve import resolve_model

    folder = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    ends = generation_end_ids(folder)
    own = [(finding.severity, finding.what) for finding in probe(Renderer.load(folder), ends, TOOLS)]
    assert said(own, "error", "ignores tools")
    assert probe(Renderer.load(folder, str(RECIPE)), ends, TOOLS) == ()
