"""What is streamed, joined, is what is said at once; nothing half is ever shown."""

from __future__ import annotations

import itertools

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.errors import InfraError
from gymloop.serving.streaming import Detokenizer, StopSearch
from toys import BASE, text_ids

from .scripted import CALL_TEXT, USER, WX, read_events, until

THINK = "<think>\nsearch it\n</think>\n\n"


def pieces_of(ids, cuts):
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(max_size=40), st.binary(max_size=8), st.lists(st.integers(0, 200), max_size=12))
def test_any_pieces_of_any_bytes_decode_as_the_whole(renderer_of, text, junk, cuts):
    decode = renderer_of("q").decode
    ids = [BASE + byte for byte in text.encode() + junk + text.encode()]
    detokenizer = Detokenizer(decode, ())
    shown = [detokenizer.feed(piece) for piece in pieces_of(ids, cuts)]
    whole = decode(ids)
    assert "".join(shown) + detokenizer.end(whole) == whole
    if not junk:
        assert all("\ufffd" not in piece or "\ufffd" in text for piece in shown)


@given(st.text(alphabet="aé你👍 ", max_size=12), st.lists(st.integers(0, 60), max_size=8), st.binary(max_size=4))
def test_a_run_of_byte_tokens_is_shown_when_it_has_ended(text, cuts, junk):
    from tokenizers import Tokenizer, decoders, models

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "<unk>": 258}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def decode(ids):
        return core.decode(list(ids), skip_special_tokens=False)

    ids = [256, *text.encode(), 257, *junk, *text.encode(), 256]
    detokenizer = Detokenizer(decode, frozenset(range(256)))
    shown = [detokenizer.feed(piece) for piece in pieces_of(ids, cuts)]
    whole = decode(ids)
    shown.append(detokenizer.end(whole))
    assert "".join(shown) == whole


@given(st.text(alphabet="ab\n", max_size=20), st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_in_whatever_pieces_it_comes(text, stops):
    search = StopSearch(stops)
    shown = "".join(search.feed(letter) for letter in text)
    ends = {text.find(stop) + len(stop): text.find(stop) for stop in stops if stop in text}
    assert search.found == bool(ends)
    if ends:
        first = min(ends)  # the string that is complete first ends the sample
        starts = [text[:first].find(stop) for stop in stops if text[:first].endswith(stop)]
        assert shown == text[: min(starts)]
    else:
        assert shown + search.end() == text


def joined(events: list[dict]) -> dict:
    """The message that a client puts together."""
    message: dict = {"content": ""}
    for event in events:
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    (call,) = value
                    calls = message.setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    else:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                elif isinstance(value, str) and name != "role":
                    message[name] = message.get(name, "") + value
                else:
                    message[name] = value
    return message


@pytest.mark.parametrize("piece", [1, 4, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "4C.",
        "",
        "h\u00e9llo \u4f60\u597d \U0001f44d",
        CALL_TEXT,
        "Checking both." + CALL_TEXT + CALL_TEXT,
        THINK + "4C.",
        THINK + "Checking." + CALL_TEXT,
        '<tool_call>{"name": "wx", "argu</tool_call>',
    ],
)
def test_a_streamed_reply_is_the_whole_reply(serve, renderer_of, text, piece):
    served = serve(renderer=renderer_of("q", "think"))
    served.engine.piece = piece
    served.say(text, 2)
    (whole,) = served.chat([USER], tools=[WX], logprobs=True, return_token_ids=True)["choices"]
    served.say(text, 2)
    asked = {"messages": [USER], "tools": [WX], "logprobs": True, "return_token_ids": True}
    events = served.stream(**asked, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == list(served.engine.prompts[-1])
    *chunks, last, usage = events
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(text.encode()) + 1
    assert all(event["usage"] is None for event in (*chunks, last))
    assert [event["choices"][0]["finish_reason"] for event in chunks] == [None] * len(chunks)
    assert last["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert last["choices"][0]["token_ids"] == whole["token_ids"]
    assert last["choices"][0]["weight_versions"] == [6, 7]
    told = [event["choices"][0]["logprobs"] for event in (*chunks, last)]
    assert [entry for one in told if one for entry in one["content"]] == whole["logprobs"]["content"]
    message, said = joined(events), dict(whole["message"])
    ids = [[call.pop("id") for call in one.get("tool_calls", [])] for one in (message, said)]
    assert len(ids[0]) == len({*ids[0], *ids[1]}) - len(ids[1])
    said["content"] = said["content"] or ""
    del message["role"], said["role"]
    assert message == said


def test_no_delta_holds_half_a_character(serve):
    served = serve()
    text = "h\u00e9 \u4f60 \U0001f44d"
    served.say(text, 2)
    deltas = [event["choices"][0]["delta"].get("content", "") for event in served.stream(messages=[USER])]
    assert "".join(deltas) == text
    assert len([delta for delta in deltas if delta]) > 1
    assert not any("\ufffd" in delta for delta in deltas)


def test_f06_a_streamed_turn_that_was_cut_shows_no_call(serve):
    served = serve()
    served.say("Hm." + CALL_TEXT + CALL_TEXT[:40])
    events = served.stream(messages=[USER], max_tokens=len("Hm." + CALL_TEXT) + 40)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert joined(events)["content"] == "Hm." + CALL_TEXT + CALL_TEXT[:40]
    assert "tool_calls" not in joined(events)


def test_n_samples_are_streamed_side_by_side(serve):
    served = serve(profiles=None)
    served.say("one", 2)
    served.say("three", 2)
    events = served.stream(messages=[USER], n=2)
    texts = {
        index: joined([e for e in events if e["choices"] and e["choices"][0]["index"] == index])["content"]
        for index in (0, 1)
    }
    assert sorted(texts.values()) == ["one", "three"]


def test_a_stop_string_is_never_shown_in_a_stream(serve):
    served = serve(profiles=None)
    served.say("one\nSTAR\nSTOP two", 2)
    events = served.stream(messages=[USER], stop="\nSTOP")
    assert joined(events)["content"] == "one\nSTAR"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_error_before_the_first_token_is_a_status_and_after_it_an_event(serve, monkeypatch):
    served = serve()

    async def dead(prompt, sampling, request_id, on_tokens=None):
        if served.engine.script:
            on_tokens(served.engine.script.pop(), [-0.5])
        raise InfraError("the step thread died")

    monkeypatch.setattr(served.engine, "generate", dead)
    assert served.refused(503, stream=True) == ("engine_failed", None)
    served.engine.script.append(tuple(text_ids("4")))
    response = served.post(messages=[USER], stream=True)
    assert response.status_code in (200, 503)
    assert "the step thread died" in response.text
    until(lambda: served.server.active_requests == 0)


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_slot(serve):
    served = serve()
    served.engine.hold = 2
    served.say("4C. and more", 2)
    url = f"{served.server.url}/chat/completions"
    with httpx.stream("POST", url, json={"messages": [USER], "stream": True}, trust_env=False) as response:
        lines = response.iter_lines()  # httpx hangs up when this is dropped
        next(lines)
        assert served.server.active_requests == 1
    until(lambda: served.server.active_requests == 0)
    assert served.engine.cancelled.wait(5)
    assert len(served.engine.aborted) == 1


def test_a_stream_that_takes_too_long_ends_with_an_error_event(serve):
    served = serve(request_timeout_s=2.0)
    served.engine.hold = 2
    served.say("4C. and more", 2)
    response = served.post(messages=[USER], stream=True)
    assert response.status_code == 200
    assert read_events(response.text)[-1]["error"]["code"] == "request_timeout"
    assert served.engine.cancelled.wait(5)
