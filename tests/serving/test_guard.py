"""F07, A8: every field that changes what is sampled is the profile's, or is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gymloop.config.plan import SamplingProfile
from gymloop.generation.engine import Sampling
from gymloop.serving.guard import SURFACE, UNCHANGED, Does, read_wish
from gymloop.serving.limits import Limits
from gymloop.serving.refusal import ApiError

CHANGED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"120": 5},
    "n": 2,
    "stop": ["\n"],
    "stop_token_ids": [7],
    "ignore_eos": True,
}
"""A legal value of every field that the engine honours, other than the one it is locked to."""


def wish(profile, **given):
    return read_wish(given, profile, 300, Limits())


def refusal(profile, **given) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as refused:
        wish(profile, **given)
    return refused.value.status, refused.value.code, refused.value.param


@pytest.mark.parametrize("name", SURFACE)
def test_a8_a_locked_server_refuses_every_field_of_the_surface_that_differs(name):
    value = CHANGED.get(name, {"type": "something"})
    assert refusal(UNCHANGED, **{name: value}) == (400, "off_profile", name)


@pytest.mark.parametrize("name", [name for name, rule in SURFACE.items() if not isinstance(rule, Does)])
def test_without_a_lock_what_the_engine_cannot_do_is_refused_and_not_ignored(name):
    assert refusal(None, **{name: {"type": "something"}}) == (400, "unsupported_field", name)


def test_without_a_lock_all_the_engine_can_do_reaches_it():
    asked = wish(None, **CHANGED, seed=5)
    assert asked.n == 2
    assert asked.stop == ("\n",)
    assert asked.sampling(16, (2, 0), "g/0/1", 1) == Sampling(
        max_new_tokens=16,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        stop_token_ids=(7,),
        seed=6,
        min_p=0.05,
        repetition_penalty=1.05,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={120: 5.0},
        noise_key="g/0/1#1",
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 1, "top_p": 1.0, "top_k": -1},
        {"top_k": 0, "n": 1, "stop": "", "stop_token_ids": [], "logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "best_of": 1, "use_beam_search": False},
    ],
)
def test_fields_that_say_what_the_profile_says_are_accepted(given):
    assert wish(UNCHANGED, **given).sampling(9, (2,), None, 0) == Sampling(9, 1.0, 1.0, None, (2,))


def test_silence_takes_the_profile_and_not_the_default():
    profile = SamplingProfile(0.6, 0.95, 20)
    assert wish(profile).sampling(9, (2,), None, 0) == Sampling(9, 0.6, 0.95, 20, (2,))
    assert refusal(profile, temperature=1.0) == (400, "off_profile", "temperature")
    assert refusal(profile, top_k=-1) == (400, "off_profile", "top_k")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"temperature": "1.0"}, "invalid_type"),
        ({"temperature": True}, "invalid_type"),
        ({"n": True}, "invalid_type"),
        ({"n": 0}, "invalid_value"),
        ({"n": 129}, "too_many"),
        ({"top_k": -7}, "invalid_value"),
        ({"top_p": 0}, "invalid_value"),
        ({"temperature": -0.1}, "invalid_value"),
        ({"min_p": 2}, "invalid_value"),
        ({"repetition_penalty": 0}, "invalid_value"),
        ({"presence_penalty": 3}, "invalid_value"),
        ({"logit_bias": {"300": 1}}, "invalid_value"),
        ({"logit_bias": {"x": 1}}, "invalid_value"),
        ({"logit_bias": {"1": 101}}, "invalid_value"),
        ({"logit_bias": [1]}, "invalid_type"),
        ({"stop": 5}, "invalid_type"),
        ({"stop": ["a"] * 17}, "too_many"),
        ({"stop_token_ids": ["a"]}, "invalid_type"),
        ({"best_of": "1"}, "invalid_type"),
        ({"seed": 2**63}, "invalid_value"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(given, code):
    assert refusal(None, **given) == (400, code, next(iter(given)))


def test_ignore_eos_samples_past_the_end_token():
    assert wish(None, ignore_eos=True).sampling(9, (2, 0), None, 0).stop_token_ids == ()


def test_the_guard_does_not_rest_on_asserts():
    code = (
        "from gymloop.serving.guard import UNCHANGED, read_wish\n"
        "from gymloop.serving.limits import Limits\n"
        "from gymloop.serving.refusal import ApiError\n"
        "for field in ({'temperature': 0.7}, {'min_p': 0.1}, {'temperature': '1.0'}, {'guided_json': {}}):\n"
        "    try: read_wish(field, UNCHANGED, 9, Limits())\n"
        "    except ApiError as error: print(error.status, error.code)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:4] == ["400 off_profile", "400 off_profile", "400 invalid_type", "400 off_profile"]


SCHEMA = {"type": "json_schema", "name": "x", "schema": {}}
R = [
    ({}, None),
    ({"temperature": 1.0, "top_p": 1.0}, None),
    ({"temperature": 0.7}, "temperature"),
    ({"top_k": 20}, "top_k"),
    ({"top_k": -1}, None),
    ({"min_p": 0.05}, "min_p"),
    ({"repetition_penalty": 1.05}, "repetition_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"120": 5}}, "logit_bias"),
    ({"n": 2}, "n"),
    ({"temperature": 1}, None),
    ({"seed": 7}, None),
]


@pytest.mark.parametrize(("route", "text"), [("/v1/responses", "input"), ("/v1/completions", "prompt")])
def test_f07_the_rules_hold_on_every_route(serve, route, text):
    served = serve()
    for fields, param in R:
        if param is not None:
            assert served.refused(400, route=route, **fields) == ("off_profile", param)
            continue
        served.say("4C.", 2)
        served.ok(route, **{text: "hi"}, **fields)
        assert served.engine.samplings[-1].temperature == 1.0
        assert served.engine.samplings[-1].top_k is None
    assert served.refused(400, route=route, temperature="1.0") == ("invalid_type", "temperature")
    assert served.refused(400, route=route, temprature=0.5) == ("unknown_field", "temprature")
    assert f"did you mean {text}?" in served.post(route, messages=[]).text
    if route == "/v1/responses":
        assert served.refused(400, route=route, text={"format": SCHEMA}) == ("off_profile", "text.format")
        assert served.refused(400, route=route, tool_choice="required") == ("off_profile", "tool_choice")


def test_the_noise_key_comes_from_its_header(serve):
    served = serve()
    for key in ("a/3/1", "caf%C3%A9/0/0"):
        served.say("4C.", 2)
        served.chat([{"role": "user", "content": "hi"}], headers={"x-gymloop-noise-key": key})
    assert [sampling.noise_key for sampling in served.engine.samplings] == ["a/3/1", "café/0/0"]
    long = {"x-gymloop-noise-key": "k" * 513}
    assert served.refused(400, headers=long) == ("invalid_value", "x-gymloop-noise-key")


def test_n_samples_are_n_calls_and_are_told_apart(serve):
    served = serve(profiles=None)
    for text in ("one", "two", "three"):
        served.say(text, 2)
    reply = served.chat([{"role": "user", "content": "hi"}], n=3, seed=4)
    assert sorted(choice["message"]["content"] for choice in reply["choices"]) == ["one", "three", "two"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(served.engine.request_ids)) == 3
    assert [sampling.seed for sampling in served.engine.samplings] == [4, 5, 6]
    assert reply["usage"]["completion_tokens"] == sum(len(text) + 1 for text in ("one", "two", "three"))


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_a_stop_string_ends_the_sample_at_the_token_that_completes_it(serve, piece):
    served = serve(profiles=None)
    served.engine.piece = piece
    served.say("one\n\ntwo", 2)
    (choice,) = served.chat([{"role": "user", "content": "hi"}], stop=["\n\n", "zzz"])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
    assert len(choice["message"]["generation_token_ids"]) == len(choice["message"]["generation_log_probs"]) == 5
    assert served.engine.aborted
