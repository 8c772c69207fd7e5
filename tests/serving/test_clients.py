"""Clients that people use, unmodified: the openai client, and the three places where NeMo Gym finds tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from gymloop.tokens import Renderer

from .scripted import CALL_TEXT, TOOL, USER, WX, Served

FLAT = {"type": "function", "name": "wx", "parameters": {"type": "object", "properties": {}}, "strict": False}
TURN = "<think>\nsearch it\n</think>\n\nChecking." + CALL_TEXT


@pytest.fixture
def connect() -> Iterator[Callable[[Served], openai.OpenAI]]:
    """``connect(served)`` is an openai client."""
    with httpx.Client(trust_env=False) as transport:
        yield lambda served: openai.OpenAI(
            base_url=served.server.url, api_key="none", http_client=transport, max_retries=0
        )


def test_the_openai_client_streams_chat_with_reasoning_and_tools(serve, renderer_of, connect):
    served = serve(renderer=renderer_of("q", "think"))
    client = connect(served)
    served.say(TURN, 2)
    with client.chat.completions.stream(
        model="toy", messages=[USER], tools=[WX], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
    (choice,) = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Checking.")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert choice.message.model_extra["reasoning_content"] == "search it"
    assert choice.message.model_extra["generation_token_ids"][-1] == 2
    assert choice.message.model_extra["prompt_token_ids"] == list(served.engine.prompts[0])
    assert final.usage.completion_tokens == len(TURN) + 1

    # What the client has put together carries the turn.
    served.say("4C.", 2)
    message = {key: value for key, value in choice.message.to_dict().items() if key != "parsed"}
    for call in message["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    tool = TOOL | {"tool_call_id": message["tool_calls"][0]["id"]}
    again = client.chat.completions.create(model="toy", messages=[USER, message, tool], tools=[WX])
    assert again.choices[0].model_extra["new_segment"] is False
    exact = (*message["prompt_token_ids"], *message["generation_token_ids"])
    assert served.engine.prompts[1][: len(exact)] == exact


def test_f04_the_openai_client_feeds_response_items_back(serve, renderer_of, connect):
    served = serve(renderer=renderer_of("q", "think"))
    client = connect(served)
    served.say(TURN, 2)
    first = client.responses.create(model="toy", input=[USER], tools=[FLAT], instructions="Be brief.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "Checking."
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "4C"}
    served.say("4C.", 2)
    second = client.responses.create(
        model="toy", input=[USER, *first.output, result], tools=[FLAT], instructions="Be brief."
    )
    exact = (*served.engine.prompts[0], *first.output[-1].model_extra["generation_token_ids"])
    assert served.engine.prompts[1][: len(exact)] == exact
    assert (second.status, second.output_text) == ("completed", "4C.")


def test_the_openai_client_streams_responses(serve, renderer_of, connect):
    served = serve(renderer=renderer_of("q", "think"))
    served.say(TURN, 2)
    with connect(served).responses.stream(model="toy", input="hi", tools=[FLAT]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == "Checking."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[-1].model_extra["generation_token_ids"][-1] == 2


def test_the_openai_client_completes_text_and_reads_errors(serve, connect):
    served = serve()
    client = connect(served)
    served.say(" is cold", 2)
    assert client.completions.create(model="toy", prompt="Oslo", logprobs=0).choices[0].text == " is cold"
    served.say(" is cold", 2)
    chunks = list(client.completions.create(model="toy", prompt="Oslo", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " is cold"
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="toy", input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_nemo_gym_finds_the_same_tokens_in_all_three_places(serve):
    served = serve()
    served.say("ok", 2)
    asked = {"messages": [USER], "logprobs": True, "top_logprobs": 0}
    asked |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "parallel_tool_calls": True}
    body = served.ok("/v1/chat/completions", model="toy", **asked)
    (choice,) = body["choices"]
    message = choice["message"]
    prompt, sampled, logprobs = (
        message[name] for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    )
    # 1. with the message
    assert (prompt, len(sampled)) == (list(served.engine.prompts[0]), 3)
    # 2. on top, in the choice, in the logprobs
    assert (body["prompt_token_ids"], choice["token_ids"]) == (prompt, sampled)
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == logprobs
    # 3. in the logprobs' names, and from /tokenize at the root
    assert [int(entry["token"].removeprefix("token_id:")) for entry in entries] == sampled
    extra = {"model": "toy", "tools": [], "chat_template_kwargs": {}, "mm_processor_kwargs": {}}
    assert served.ok("/tokenize", messages=[USER], **extra)["tokens"] == prompt
    exact = [*prompt, *sampled]
    history = [USER, {"role": "assistant", "content": message["content"]}, TOOL]
    longer = served.ok("/tokenize", messages=history, required_prefix_token_ids=exact, **extra)["tokens"]
    served.say("x", 2)
    served.chat([USER, message, TOOL])
    assert tuple(longer) == served.engine.prompts[1]
    assert longer[: len(exact)] == exact


def test_the_real_engine_streams_and_stops_for_the_openai_client(toy, serve, connect):
    from gymloop.generation.torch_engine import TorchEngine

    engine = TorchEngine(toy("q"), dtype="float32", device="cpu", max_batch_size=4, max_model_len=128)
    try:
        served = serve(profiles=None, engine=engine, renderer=Renderer.load(toy("q")))
        client = connect(served)
        asked = {"model": "toy", "messages": [USER], "max_tokens": 24, "seed": 3}
        whole = client.chat.completions.create(**asked)
        streamed = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == whole.choices[0].message.content
        ids = streamed[-1].choices[0].delta.model_extra["generation_token_ids"]
        assert ids == whole.choices[0].message.model_extra["generation_token_ids"]
        if len(text) > 3:
            (choice,) = client.chat.completions.create(**asked, stop=[text[2:4]]).choices
            assert choice.message.content == text[: text.index(text[2:4])]
            assert choice.finish_reason == "stop"
        response = client.responses.create(model="toy", input="hi", max_output_tokens=5)
        assert response.usage.output_tokens <= 5
        assert served.metric("gymloop_requests_queued") == 0
        both = client.chat.completions.create(**asked, n=2)
        assert len(both.choices) == 2
    finally:
        engine.close()
