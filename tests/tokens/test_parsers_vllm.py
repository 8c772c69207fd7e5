"""vLLM's parser interface in gymloop's reader: a plug-in that registers with vLLM, and parsers that vLLM ships."""

import pytest

import toys
from gymloop.errors import ConfigError
from gymloop.tokens.reply import reply_reader

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PLUGIN = """
import json, re
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module("bang")
class Bang(ToolParser):
    def extract_tool_calls(self, model_output, request):
        if "boom" in model_output:
            raise RuntimeError("a reading that fails")
        found = re.findall(r"!(\\w+)", model_output)
        calls = [ToolCall(function=FunctionCall(name=name, arguments=json.dumps({"tools": len(request.tools or ())})))
                 for name in found]
        content = re.sub(r"!\\w+", "", model_output).strip()
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)
"""
REASONING = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager

@ReasoningParserManager.register_module("hash")
class Hash(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return True

    def extract_content_ids(self, input_ids):
        return input_ids

    def extract_reasoning(self, model_output, request):
        reasoning, _, content = model_output.rpartition("#")
        return reasoning.strip() or None, content.strip()

    def extract_reasoning_streaming(self, *args):
        return None
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toys.build_toy(tmp_path_factory.mktemp("parsers"), "q", weights=False)


@pytest.fixture(scope="module")
def bang(folder):
    plugin = folder / "bang.py"
    plugin.write_text(PLUGIN)
    return reply_reader("bang", plugin, tokenizer_folder=folder)


def test_a_plug_in_that_registers_with_vllm_reads_calls(bang):
    reply = bang.read("I will !add and !sub", tools=TOOLS)
    assert [call.name for call in reply.tool_calls] == ["add", "sub"]
    assert reply.tool_calls[0].arguments == '{"tools": 1}'
    assert reply.content == "I will  and"


@pytest.mark.parametrize("text", ["nothing here", "boom !add"])
def test_a_reply_without_calls_or_that_the_parser_fails_on_stays_text(bang, text):
    reply = bang.read(text, tools=TOOLS)
    assert (reply.content, reply.tool_calls) == (text, ())


def test_what_a_parser_raises_is_logged_once_for_each_kind(folder, caplog):
    plugin = folder / "boom.py"
    plugin.write_text(PLUGIN.replace('"bang"', '"boom"').replace("class Bang", "class Boom"))
    reader = reply_reader("boom", plugin, tokenizer_folder=folder)
    for _ in range(3):
        reader.read("boom !add", tools=TOOLS)
    (record,) = [record for record in caplog.records if "Boom" in record.getMessage()]
    assert "RuntimeError: a reading that fails" in record.getMessage()
    assert "taken as one without tool calls" in record.getMessage()


def test_a_reasoning_plug_in_splits_a_reply(folder):
    plugin = folder / "hash.py"
    plugin.write_text(REASONING)
    reader = reply_reader(reasoning_parser="hash", reasoning_parser_plugin=plugin, tokenizer_folder=folder)
    reply = reader.read("because # so")
    assert (reply.reasoning, reply.content) == ("because", "so")
    assert reader.read("plain").content == "plain"


def test_a_name_that_nobody_has_is_refused(folder):
    with pytest.raises(ConfigError, match=r"'no_such' *; neither gymloop nor the installed vLLM"):
        reply_reader("no_such", tokenizer_folder=folder)
