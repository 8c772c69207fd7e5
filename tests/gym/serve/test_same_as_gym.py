"""The real example server of NeMo Gym and a served environment, asked the same: same statuses, same shapes."""

import os

import httpx
import pytest

from gymloop.gym import Environment, tool
from gymloop.gym.items import final_text
from gymloop.gym.nemo.host import Gym, close, host
from gymloop.gym.nemo.install import Installation

from ..nemo.conftest import installation
from .served import serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
real = installation
SERVER = "example_single_tool_call"
PARAMS = {"input": [{"role": "user", "content": "Weather in SF?"}]}
SAID = {
    "type": "message",
    "id": "msg_0",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "cold", "annotations": []}],
}
RESPONSE = {
    "id": "resp_0",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "output": [SAID],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
WHOLE = {"responses_create_params": PARAMS, "response": RESPONSE}
ASKED = {
    "seed": ("/seed_session", {"responses_create_params": PARAMS, "other": 1}),
    "tool": ("/get_weather", {"city": "SF"}),
    "no argument": ("/get_weather", {}),
    "wrong type": ("/get_weather", {"city": 3}),
    "tool gets a list": ("/get_weather", []),
    "no such tool": ("/get_wether", {"city": "SF"}),
    "verify": ("/verify", WHOLE),
    "verify without response": ("/verify", {"responses_create_params": PARAMS}),
    "verify without row": ("/verify", {"response": RESPONSE}),
    "verify with output that is no list": ("/verify", {**WHOLE, "response": {**RESPONSE, "output": 3}}),
    "metrics of nothing": ("/aggregate_metrics", {}),
    "not json": ("/seed_session", b"{"),
}


class Weather(Environment):
    @tool
    def get_weather(self, city: str) -> dict:
        """Tell the weather.

        Args:
            city: where.
        """
        return {"city": city, "weather_description": f"The weather in {city} is cold."}

    def verify(self, response):
        return float("cold" in final_text(response))


def replies(url: str) -> dict[str, httpx.Response]:
    found = {}
    with httpx.Client(base_url=url, timeout=120, trust_env=False, verify=False) as client:
        for name, (route, body) in ASKED.items():
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            if name.startswith("verify"):
                client.post("/seed_session", json={"responses_create_params": PARAMS})
            found[name] = client.post(route, **how)
        found["alive"] = client.get("/healthz")
    return found


def metrics_of(url: str, verdicts: list) -> dict:
    with httpx.Client(base_url=url, timeout=300, trust_env=False, verify=False) as client:
        return client.post("/aggregate_metrics", json={"verify_responses": verdicts}).json()


async def test_a_served_environment_answers_as_nemo_gyms_example_server_does(real: Installation, tmp_path):
    gym = Gym.load(real, {"config_paths": [f"resources_servers/{SERVER}/configs/{SERVER}.yaml"]}, [], os.environ)
    servers = await host(gym, tmp_path)
    try:
        theirs = replies(servers[SERVER].url)
        verdicts = [
            {"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": task + repeat / 3, "solved": repeat > 0}
            for task in range(3)
            for repeat in range(2)
        ]
        verdicts[4]["mask_sample"] = True
        reference = metrics_of(servers[SERVER].url, verdicts)
    finally:
        await close(servers)
    with serving(Weather, name="weather") as served:
        ours = replies(served.url)
        metrics = metrics_of(served.url, verdicts)
    assert {name: reply.status_code for name, reply in ours.items()} == {
        name: reply.status_code for name, reply in theirs.items()
    }
    assert ours["tool"].json() == theirs["tool"].json()
    for name in ("seed", "alive"):
        assert ours[name].json() == theirs[name].json()
    cookie = theirs["seed"].headers["set-cookie"].split(";")
    assert {part.strip().lower() for part in ours["seed"].headers["set-cookie"].split(";")[1:]} <= {
        part.strip().lower() for part in cookie[1:]
    }
    for name in ("verify without response", "verify without row"):
        (own,), (other,) = ours[name].json()["detail"], theirs[name].json()["detail"]
        assert {key: own[key] for key in ("type", "loc", "msg")} == {key: other[key] for key in ("type", "loc", "msg")}
    judged, reference_verdict = ours["verify"].json(), theirs["verify"].json()
    assert {
        "reward",
        "mask_sample",
        "failure_kind",
        "failure_reason",
        "response",
    } <= judged.keys() & reference_verdict.keys()
    for part in ("agent_metrics", "key_metrics"):
        assert {name: reference[part][name] for name in metrics[part]} == pytest.approx(metrics[part])
    for own, other in zip(metrics["group_level_metrics"], reference["group_level_metrics"], strict=True):
        for name in own.keys() - {"rollout_infos"}:
            assert own[name] == pytest.approx(other[name])
