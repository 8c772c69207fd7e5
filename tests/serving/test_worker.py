"""The engine's worker: it says what it loads, opens only what the probe passed, answers whatever the engine does."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.serving.worker import EngineSpec, EngineWorker, has_chat_template
from gymloop.startup.sockets import hold_socket

from .scripted import until

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def worker() -> Iterator[Callable[..., EngineWorker]]:
    made: list[EngineWorker] = []

    def make(**fields) -> EngineWorker:
        values = {"model_name": "toy", "profiles": None, "port_range": (22000, 22999), "request_timeout_s": 60.0}
        values |= {"max_model_len": 512, "max_batch_size": 4} | fields
        made.append(EngineWorker(EngineSpec(**values)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def load(worker: EngineWorker, folder: Path) -> dict:
    return worker.load(str(folder), str(folder))


def ask(worker: EngineWorker, route: str = "/chat/completions", **body) -> httpx.Response:
    request = {"model": "toy", "messages": HELLO, "max_tokens": 3, **body}
    return httpx.post(f"{worker.url()}{route}", json=request, trust_env=False, timeout=60)


def reason(worker: EngineWorker) -> str:
    response = httpx.get(worker.url().replace("/v1", "/readyz"), trust_env=False, timeout=20)
    assert response.status_code == 503
    return response.json()["error"]["message"]


def test_a_503_says_what_is_loaded_and_how_much_of_it(worker, toy, monkeypatch):
    from gymloop.generation import decoder

    served = worker()
    assert reason(served) == "waiting for the model's folder"
    seen: list[tuple[str, tuple[str, int, int]]] = []
    real = decoder.load_causal_lm

    def half_way(folder, dtype, device, on_bytes):
        on_bytes(30_000_000, 60_000_000)
        seen.append((reason(served), served.load_progress()))
        return real(folder, dtype, device, on_bytes)

    monkeypatch.setattr(decoder, "load_causal_lm", half_way)
    load(served, toy("q"))
    assert seen == [("waiting for the weights, 50% of 60 MB", ("the weights", 30_000_000, 60_000_000))]
    assert served.load_progress() == ("ready", 0, 0)
    assert ask(served).status_code == 200


def test_progress_changes_while_weights_load(worker, toy, monkeypatch):
    served = worker()
    seen: set[tuple[int, int]] = set()
    monkeypatch.setattr(served, "_at", lambda *at: (seen.add(at[1:]), EngineWorker._at(served, *at)))
    load(served, toy("q"))
    seen.discard(())  # what is no weights has no bytes
    assert len(seen) > 5
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert (totals.pop(),) * 2 in seen


def test_replies_do_not_wait_for_delayed_acknowledgements():
    with hold_socket(22000, 22999) as listening:
        assert listening.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only where the protocol is named"


def test_how_far_loading_is_needs_no_lock(worker, toy):
    served = worker()
    load(served, toy("q"))
    answered: list[tuple] = []
    with served._lock:
        thread = threading.Thread(target=lambda: answered.append(served.load_progress()))
        thread.start()
        thread.join(5)
    assert answered == [("ready", 0, 0)]


def test_how_far_loading_is_can_be_asked_while_it_loads(worker, toy, monkeypatch):
    from gymloop.generation import decoder

    served, inside, go_on = worker(), threading.Event(), threading.Event()
    real = decoder.load_causal_lm

    def slow(*args):
        inside.set()
        assert go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(decoder, "load_causal_lm", slow)
    loading = threading.Thread(target=load, args=(served, toy("q")))
    loading.start()
    assert inside.wait(60)
    began = time.monotonic()
    assert served.load_progress()[0] == "the weights"
    assert time.monotonic() - began < 10
    go_on.set()
    loading.join(60)
    assert served.load_progress()[0] == "ready"


def test_the_facts_of_a_load(worker, toy):
    facts = load(worker(max_model_len=None, max_batch_size=None, device="auto"), toy("q"))
    assert facts["max_model_len"] == 4096
    assert 1 <= facts["max_batch_size"] <= 64
    assert facts["device"] in ("cpu", "cuda")
    assert facts["chat"] is True
    for precision in ("float32", "bfloat16"):
        facts = load(worker(precision=precision), toy("q"))
        assert (facts["max_model_len"], facts["max_batch_size"], facts["precision"]) == (512, 4, precision)


def test_errors_of_the_probe_keep_the_server_shut_and_all_are_told(worker, toy, monkeypatch):
    from gymloop.tokens import probe

    findings = [
        probe.Finding("error", "the first."),
        probe.Finding("warning", "mild."),
        probe.Finding("error", "next."),
    ]
    monkeypatch.setattr(probe, "probe", lambda *args, **named: tuple(findings))
    served = worker()
    with pytest.raises(ConfigError, match=r"the first\.\nnext\."):
        load(served, toy("q"))
    assert "the first." in reason(served)


def test_a_parser_that_cannot_read_what_the_template_writes_is_found(worker, toy):
    # The template writes Hermes' envelopes; Mistral's parser sees none in them. No tools are known here: a warning.
    warnings = load(worker(tool_parser="mistral"), toy("q"))["warnings"]
    assert [one for one in warnings if "reads no call in it" in one]
    assert not [one for one in load(worker(), toy("q"))["warnings"] if "tool parser" in one]


def test_with_the_tools_of_a_run_what_was_a_warning_ends_the_start(worker, toy, caplog):
    tool = {"type": "function", "function": {"name": "wx", "parameters": {"type": "object", "properties": {}}}}
    good = worker()
    load(good, toy("q"))
    caplog.clear()
    good.check_tools([tool])
    assert not caplog.records, "the same warnings are not told twice"
    bad = worker(tool_parser="mistral")
    load(bad, toy("q"))
    with pytest.raises(ConfigError, match=r"reads no call in it; set policy\.tokenizer\.tool_parser"):
        bad.check_tools([tool])
    with pytest.raises(InfraError, match="not loaded"):
        worker().check_tools([tool])


def test_warnings_of_the_probe_go_to_the_log(worker, toy, monkeypatch, caplog):
    from gymloop.tokens import probe

    monkeypatch.setattr(probe, "probe", lambda *args, **named: (probe.Finding("warning", "an odd end token."),))
    with caplog.at_level(logging.WARNING, "gymloop.serving.worker"):
        facts = load(worker(), toy("q"))
    assert facts["warnings"] == ("an odd end token.",)
    assert "an odd end token." in caplog.text


def test_the_probe_sees_the_models_end_tokens(worker, toy, monkeypatch):
    from gymloop.tokens import probe

    seen: list[tuple] = []
    monkeypatch.setattr(probe, "probe", lambda renderer, ends, *rest: (seen.append(ends), ())[1])
    load(worker(), toy("l"))
    assert seen == [(1, 4, 5)]


def test_an_unknown_parser_is_refused_before_the_weights(worker, toy):
    served = worker(tool_parser="herms")
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        load(served, toy("q"))
    assert served.load_progress()[1:] == (0, 0)


def test_a_plug_in_by_path_reads_the_replies(worker, toy, tmp_path):
    missing = tmp_path / "parsers.py"
    with pytest.raises(ConfigError, match=r"parsers\.py"):
        load(worker(tool_parser="mine", tool_parser_plugin=str(missing)), toy("q"))


def test_a_model_without_template_is_refused_in_a_run_and_completes_when_served(worker, toy):
    with pytest.raises(ConfigError, match="no chat template"):
        load(worker(), toy("bare"))
    served = worker(template_required=False)
    facts = load(served, toy("bare"))
    assert facts["chat"] is False
    refused = ask(served)
    assert refused.status_code == 400
    assert "has no chat template" in refused.json()["error"]["message"]
    done = httpx.post(
        f"{served.url()}/completions",
        json={"model": "toy", "prompt": "Hello", "max_tokens": 3},
        trust_env=False,
        timeout=60,
    )
    assert done.status_code == 200, done.text


def test_a_template_of_its_own_is_found_where_transformers_reads_it(toy, tmp_path):
    assert has_chat_template(toy("q"))
    assert not has_chat_template(toy("bare"))
    folder = shutil.copytree(toy("bare"), tmp_path / "inline")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().rstrip().removesuffix("}") + ', "chat_template": "{{ messages }}"}')
    assert has_chat_template(folder)
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        has_chat_template(folder)


def test_a_failed_load_is_told_to_clients(worker, tmp_path):
    served = worker()
    with pytest.raises(ConfigError):
        load(served, tmp_path)
    assert "the engine did not start" in reason(served)


def test_a_worker_closed_while_it_loads_frees_the_engine(worker, toy, monkeypatch):
    from gymloop.generation import decoder

    served = worker()
    real = decoder.load_causal_lm

    def close_first(*args):
        served.close()
        return real(*args)

    monkeypatch.setattr(decoder, "load_causal_lm", close_first)
    with pytest.raises(InfraError, match="closed while its model loaded"):
        load(served, toy("q"))
    served.close()


def test_new_weights_reach_the_next_token(worker, toy):
    import torch

    from gymloop.models.load import load_causal_lm
    from gymloop.weights.snapshot import take

    served = worker()
    load(served, toy("q"))
    assert served.weight_version() == 0
    model = load_causal_lm(toy("q"), "float32", "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    served.load_weights(take(model.named_parameters()), 1)
    assert served.weight_version() == 1
    reply = ask(served, logprobs=True).json()["choices"][0]
    assert reply["weight_versions"] == [1, 1]


def test_a_dead_engine_is_told(worker, toy):
    served = worker()
    served.check()
    load(served, toy("q"))
    served.check()
    served._engine.close()
    with pytest.raises(InfraError, match="closed"):
        served.check()


def test_an_engine_that_cannot_be_paused_for_new_weights_is_stuck_until_it_can(worker, toy, monkeypatch):
    import torch

    from gymloop.models.load import load_causal_lm
    from gymloop.serving import worker as module
    from gymloop.weights.snapshot import take

    served = worker()
    load(served, toy("q"))
    weights = take(load_causal_lm(toy("q"), "float32", "cpu").named_parameters())
    begun, goes_on = threading.Event(), threading.Event()

    def stand_still(*_):
        begun.set()
        goes_on.wait(60)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(stand_still)
    asking = threading.Thread(target=ask, args=(served,))
    try:
        asking.start()
        assert begun.wait(60)
        monkeypatch.setattr(module, "PAUSE_TIMEOUT_S", 0.2)
        with pytest.raises(InfraError, match=r"pause waited 0\.2 s"):
            served.load_weights(weights, 1)
        with pytest.raises(InfraError, match=r"pause waited 0\.2 s"):
            served.check()
    finally:
        goes_on.set()
        hook.remove()
    asking.join(60)
    served.load_weights(weights, 1)
    served.check()


def test_traffic_counts_what_was_served(worker, toy):
    served = worker()
    assert served.traffic().samples == 0
    load(served, toy("q"))
    sampled = sum(ask(served, seed=seed).json()["usage"]["completion_tokens"] for seed in range(3))
    ask(served, temperature=-1)
    until(lambda: served.traffic().in_flight == 0)  # the client has the reply a moment before
    traffic = served.traffic()
    assert (traffic.samples, traffic.tokens, traffic.in_flight, traffic.refused) == (3, sampled, 0, 1)
    assert traffic.prompt_tokens > 0
