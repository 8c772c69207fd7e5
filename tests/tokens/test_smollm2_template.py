"""The template that the quickstart's recipe carries: short, and read back by the parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymloop.tokens import Renderer
from toys import text_ids

TEMPLATE = Path(__file__).parents[2] / "recipes" / "smollm2_tools.jinja"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute one operation.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as 12 * 34"}},
                "required": ["expression"],
            },
        },
    }
]
USER = {"role": "user", "content": "Compute 473 * 18, then subtract 226 from the result, and tell me the final number."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "calculate", "arguments": '{"expression": "473 * 18"}'}}],
}


def text_of(renderer, *arguments, **named):
    return renderer.decode(renderer.render(*arguments, **named))


def test_tools_are_one_line_each(toy):
    renderer = Renderer.load(toy("q"), str(TEMPLATE))
    assert text_of(renderer, [USER], TOOLS) == (
        "<|im_start|>system\nTools:\ncalculate(expression: string)  Compute one operation.\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\n'
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_rows_own_system_message_comes_first(toy):
    renderer = Renderer.load(toy("q"), str(TEMPLATE))
    system = {"role": "system", "content": "Be brief."}
    text = text_of(renderer, [system, USER], TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nTools:\n")
    assert text.count("<|im_start|>") == 3
    assert text_of(renderer, [USER]).startswith("<|im_start|>user")


def test_optional_and_untyped_parameters_are_shown(toy):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"anyOf": []}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}, {"function": {"name": "now"}}]
    text = text_of(Renderer.load(toy("q"), str(TEMPLATE)), [USER], tools)
    assert "f(a: integer, b?: any)\nnow()\n" in text


def test_a_demonstration_is_read_back_and_bridged(toy):
    renderer = Renderer.load(toy("q"), str(TEMPLATE))
    tool = {"role": "tool", "content": "8514"}
    ids, sampled = renderer.demonstration([USER, CALL, tool, {"role": "assistant", "content": "Answer: 8288"}], TOOLS)
    said = renderer.decode([ids[i] for i in sampled])
    assert said == (
        '<tool_call>{"name": "calculate", "arguments": {"expression": "473 * 18"}}</tool_call><|im_end|>'
        "Answer: 8288<|im_end|>"
    )
    (call,) = renderer.reader.read(said.partition("<|im_end|>")[0]).tool_calls
    assert (call.name, call.arguments) == ("calculate", '{"expression": "473 * 18"}')
    messages = [USER, CALL, tool, {"role": "assistant", "content": "Answer: 8288"}]
    assert (*ids, *text_ids("\n")) == renderer.render(messages, TOOLS, add_generation_prompt=False)


@pytest.mark.slow
def test_the_quickstarts_prompt_is_under_120_tokens():
    from gymloop.models.resolve import resolve_model

    renderer = Renderer.load(resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct"), str(TEMPLATE))
    ids = renderer.render([USER], TOOLS)
    assert len(ids) < 120
    sampled = renderer.demonstration([USER, CALL], TOOLS)[1]
    assert len(sampled) < 48
