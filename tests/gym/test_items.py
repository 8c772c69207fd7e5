"""Between Responses items and chat messages."""

import pytest

from gymloop.errors import DataError
from gymloop.gym.items import chat_messages, chat_tools, final_text, message_item, output_item, reasoning_item


def test_one_turn_of_several_items_is_one_assistant_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Compare "}, {"type": "input_text", "text": "."}]},
        {"type": "message", "role": "assistant", "content": "Checking both."},
        {"type": "function_call", "call_id": "c1", "name": "wx", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "wx", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4C"},
        {"type": "function_call_output", "call_id": "c2", "output": "19C"},
        {"role": "assistant", "content": "done"},
    ]
    messages = chat_messages(items, instructions="Be brief.")
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert messages[1]["content"] == "Compare ."
    assert messages[2]["content"] == "Checking both."
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[4] == {"role": "tool", "tool_call_id": "c2", "content": "19C"}


def test_text_is_a_user_message_and_a_developer_is_the_system():
    assert chat_messages("hi") == [{"role": "user", "content": "hi"}]
    assert chat_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


def test_an_item_without_counterpart_is_a_data_error():
    with pytest.raises(DataError, match=r"input\[0\] has type 'web_search_call'; expected message, reasoning,"):
        chat_messages([{"type": "web_search_call"}])


def test_f04_reasoning_joins_the_message_of_its_turn():
    items = [
        {"role": "user", "content": "Compare Oslo and Lima."},
        reasoning_item("rs_0", "two queries"),
        {"type": "message", "role": "assistant", "content": "Checking both."},
        {"type": "function_call", "call_id": "c1", "name": "wx", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4C"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "done"}], "summary": []},
    ]
    messages = chat_messages(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (messages[1]["reasoning_content"], messages[1]["content"]) == ("two queries", "Checking both.")
    assert messages[3] == {"role": "assistant", "content": "", "reasoning_content": "done"}


def test_flat_tools_become_chat_tools():
    flat = {"type": "function", "name": "wx", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat_tools([flat]) == [
        {"type": "function", "function": {"name": "wx", "description": "d", "parameters": {"type": "object"}}}
    ]


def test_the_final_text_is_that_of_the_last_item_only():
    message = message_item("m", "the end", "completed")
    assert final_text({"output": [message]}) == "the end"
    assert final_text({"output": [message, output_item("c", "4")]}) == ""
    assert final_text({"output": []}) == ""
