"""Field case F07 on a whole running server with the real engine; ``python [-O] tests/f07.py FOLDER`` prints the result.

The model folder asks for temperature 0.6, top-p 0.95, top-k 20 and a repetition penalty of 1.05; the run asks for none
of these. Every way to a sample is asked: chat, responses, and a dataset row's create params through the agent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from gymloop.config.plan import SamplingProfile
from gymloop.config.schema import Rollouts
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.gym import Environment, Verdict
from gymloop.gym.model_client import ModelClient
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.collector import Collector, expand
from gymloop.rollouts.trajectory import Failure, Rollout
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.worker import EngineSpec, EngineWorker

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
REQUESTS: dict[str, tuple[dict[str, Any], str | None]] = {
    # fields, and the refusal's code and field, or None where the request is served
    "R1": ({}, None),
    "R2": ({"temperature": 1.0, "top_p": 1.0}, None),
    "R3": ({"temperature": 0.7}, "off_profile temperature"),
    "R4": ({"top_k": 20}, "off_profile top_k"),
    "R5": ({"top_k": -1}, None),
    "R6": ({"min_p": 0.05}, "off_profile min_p"),
    "R7": ({"repetition_penalty": 1.05}, "off_profile repetition_penalty"),
    "R8": ({"presence_penalty": 0.5}, "off_profile presence_penalty"),
    "R9": ({"frequency_penalty": 0.5}, "off_profile frequency_penalty"),
    "R10": ({"logit_bias": {"120": 5}}, "off_profile logit_bias"),
    "R11": ({"n": 2}, "off_profile n"),
    "R12": ({"response_format": SCHEMA}, "off_profile response_format"),
    "R13": ({"temperature": "1.0"}, "invalid_type temperature"),
    "R14": ({"temperature": 1}, None),
    "R15": ({"seed": 7}, None),
}
BY_ITEMS = ("R1", "R2", "R3", "R4", "R5", "R6", "R7")
USER = {"role": "user", "content": "Weather in Oslo?"}
TOKENS = 16


class Judge(Environment):
    """Has no tools; every answer is as good as another."""

    def verify(self, response: Any) -> Verdict:
        """Always 1."""
        return Verdict(1.0)


def play(folder: Path, vllm: VllmSettings | None = None) -> dict[str, Any]:
    """Serve the model as a run does and ask everything.

    Returns:
        For each way and request ``{"status", "refusal"}``, and of a served one its ``prompt``, ``sampled``,
        ``logprobs``; and whether Python runs its asserts.
    """
    profiles = SamplingProfiles(SamplingProfile(1.0, 1.0, None), SamplingProfile(0.5, 1.0, None))
    limits = {"max_model_len": 128, "max_batch_size": 4, "request_timeout_s": 60.0}
    spec = EngineSpec("toy", profiles, (20000, 29999), precision="float32", vllm=vllm, **limits)
    worker = EngineWorker(spec)
    try:
        worker.load(str(folder), str(folder))
        url = worker.url()
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
            chat = {name: _chat(http, fields) for name, (fields, _) in REQUESTS.items()}
            responses = {name: _responses(http, REQUESTS[name][0]) for name in BY_ITEMS}
            marked = _chat(http, {"temperature": 0.5}, {"x-gymloop-profile": "validation"})
            unmarked = _chat(http, {"temperature": 0.5})
        agent = asyncio.run(_agent(url))
    finally:
        worker.close()
    validation = {"marked": marked["status"], "unmarked": unmarked["status"]}
    return {"asserts": __debug__, "chat": chat, "responses": responses, "agent": agent, "validation": validation}


def _chat(http: httpx.Client, fields: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    body = {"messages": [USER], "logprobs": True, "max_tokens": TOKENS, **fields}
    reply = http.post("/chat/completions", json=body, headers=headers)
    if reply.status_code != 200:
        return _refused(reply)
    (choice,) = reply.json()["choices"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return _served(choice["message"], told)


def _responses(http: httpx.Client, fields: dict[str, Any]) -> dict[str, Any]:
    reply = http.post("/responses", json={"input": [USER], "max_output_tokens": TOKENS, **fields})
    if reply.status_code != 200:
        return _refused(reply)
    item = reply.json()["output"][-1]
    return _served(item, item["generation_log_probs"])


def _refused(reply: httpx.Response) -> dict[str, Any]:
    error = reply.json()["error"]
    return {"status": reply.status_code, "refusal": f"{error['code']} {error['param']}", "said": error["message"]}


def _served(bundle: dict[str, Any], told: list[float]) -> dict[str, Any]:
    if told != bundle["generation_log_probs"]:
        raise RuntimeError("the two places that tell logprobs differ")
    ids = {"prompt": bundle["prompt_token_ids"], "sampled": bundle["generation_token_ids"]}
    return {"status": 200, "refusal": None, **ids, "logprobs": told}


async def _agent(url: str) -> dict[str, Any]:
    """One rollout for each request, its fields in the row's create params."""
    source = InProcessSource("judge", Judge, {})
    rows = [
        (name, {"responses_create_params": {"input": [USER], **REQUESTS[name][0]}, "agent_ref": {"name": "judge"}})
        for name in BY_ITEMS
    ]
    async with ModelClient(url, "toy", max_concurrency=2, call_timeout_s=60.0, ready_timeout_s=5.0) as client:
        collector = Collector({"judge": source}, client, Rollouts(), max_turns=1, max_tokens=TOKENS)
        groups = await collector.gather(expand(rows, 1))
    return {
        rollout.group_id: _outcome(rollout) for group in groups for rollout in (*group.trajectories, *group.failures)
    }


def _outcome(rollout: Rollout) -> dict[str, Any]:
    if isinstance(rollout, Failure):
        return {"status": 400, "refusal": f"{rollout.kind} {rollout.cause}", "said": rollout.reason}
    (turn,) = rollout.turns
    ids = {"prompt": turn.prompt_ids, "sampled": turn.sampled_ids}
    return {"status": 200, "refusal": None, **ids, "logprobs": turn.logprobs}


if __name__ == "__main__":
    print(json.dumps(play(Path(sys.argv[1]))))
