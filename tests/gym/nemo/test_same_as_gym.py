"""Every shipped config of the real NeMo Gym, read by its own parser and by gymloop: the server blocks are equal."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.nemo.blocks import KINDS
from gymloop.gym.nemo.configs import merge
from gymloop.gym.nemo.files import read
from gymloop.gym.nemo.values import settle

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GYMS_OWN = """
import glob, json, logging, os, sys
from contextlib import redirect_stderr, redirect_stdout
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from omegaconf import OmegaConf
logging.disable()
os.chdir(sys.argv[1])
given = {"policy_model_name": "m", "policy_api_key": "k", "policy_base_url": "http://u/v1"}
model = "responses_api_models/vllm_model/configs/vllm_model.yaml"
found = {}
for path in sorted(glob.glob("resources_servers/*/configs/*.yaml")):
    config = OmegaConf.create({"config_paths": [path, model], **given})
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            parsed = GlobalConfigDictParser().parse(GlobalConfigDictParserConfig(
                initial_global_config_dict=config, skip_load_from_cli=True, skip_load_from_dotenv=True, offline=True))
        found[path] = OmegaConf.to_container(parsed, resolve=True)
    except Exception:
        pass
print(json.dumps(found, default=str))
"""
GIVEN = {"policy_model_name": "m", "policy_api_key": "k", "policy_base_url": "http://u/v1"}
MODEL = "responses_api_models/vllm_model/configs/vllm_model.yaml"


def test_shipped_configs_mean_the_same_to_gymloop_as_to_gym(installation):
    command = [str(installation.python), "-c", GYMS_OWN, str(installation.site_packages)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    gyms = json.loads(said.splitlines()[-1])
    assert len(gyms) > 100
    different = {path: what for path, theirs in gyms.items() if (what := difference(path, theirs, installation))}
    assert not different, f"{len(different)} of {len(gyms)}: {json.dumps(different, indent=1)[:4000]}"


def difference(path: str, theirs: dict, installation) -> str | None:
    try:
        given = {**GIVEN, **{key: theirs[key] for key in ("cache_dir", "results_dir")}}
        merged = merge(read([path, MODEL], [installation.site_packages]), 2, given)
    except ConfigError as error:
        return str(error)
    problems: list[str] = []
    for name, value in theirs.items():
        if not isinstance(value, dict) or not (set(value) & {"resources_servers", "responses_api_agents"}):
            continue  # Gym makes relays of its own
        ours = settle(merged.get(name), merged, os.environ, (name,), problems, set())
        if plain(ours) != plain(value):
            return f"{name}: {'; '.join(_leaves(plain(ours), plain(value)))}"
    return "; ".join(problems) or None


def plain(block):
    """Without the addresses that Gym has filled in."""
    if isinstance(block, dict):
        return {
            kind: {type_: {key: value for key, value in settings.items() if key not in ("host", "port")}
                   for type_, settings in types.items()}
            for kind, types in block.items() if kind in KINDS
        }  # fmt: skip
    return block


def _leaves(ours, theirs, where: str = ""):
    """Where two blocks differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from _leaves(ours.get(key), theirs.get(key), f"{where}.{key}")
    elif ours != theirs:
        yield f"{where}: {ours!r} is not {theirs!r}"
