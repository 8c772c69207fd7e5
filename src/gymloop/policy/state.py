"""A saved policy goes on exactly where it stopped: float32 masters, moments, schedule, generator; no pickle anywhere.

    weights/                 a Hugging Face model folder in float32 (config, generation config, tokenizer, safetensors);
                             persistent buffers in their own type
    optimizer.safetensors    ``<state>/<parameter>`` for every state tensor of AdamW
    state.json               format, schedule step, torch's generators of every rank, and what computed it

Everything is read and compared with the worker before anything of it is changed.
"""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gymloop.errors import ConfigError
from gymloop.files import UnwritableError
from gymloop.models.tensors import persistent_buffers
from gymloop.policy.optimizer import MasterAdamW

FORMAT = 2
WEIGHTS = "weights"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def save(folder: Path, model: Any, optimizer: MasterAdamW, source: Path) -> None:
    """Write the state of a policy into an existing or new folder.

    Args:
        folder: the caller makes it appear atomically.
        model: for its configuration and its persistent buffers.
        optimizer: holds the masters.
        source: model folder whose tokenizer files are copied, so that ``weights/`` can be used alone.

    Raises:
        UnwritableError: the disk refused.
    """
    try:
        _save(folder, model, optimizer, source)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a disk that is full
        reason = getattr(error, "strerror", None) or str(error)
        raise UnwritableError(f"the policy was not written: {reason} ({folder})") from error


def _save(folder: Path, model: Any, optimizer: MasterAdamW, source: Path) -> None:
    weights = folder / WEIGHTS
    weights.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    config.architectures = [type(model).__name__]
    config.save_pretrained(weights)
    for name in ("generation_config.json", *TOKENIZER_FILES):  # as they are: rewriting them could only lose something
        if (source / name).is_file():
            shutil.copyfile(source / name, weights / name)
    masters = {name: master.detach().contiguous() for name, master in optimizer.masters.items()}
    buffers = {
        name: buffer.clone(memory_format=torch.contiguous_format) for name, buffer in persistent_buffers(model).items()
    }  # two may share their memory
    save_file(masters | buffers, weights / "model.safetensors", metadata={"format": "pt"})
    save_file(_moments(optimizer), folder / OPTIMIZER)
    state = {
        "format": FORMAT,
        "schedule_step": optimizer.schedule_step,
        "generators": [_generators()],  # one entry a rank
        "made_with": made_with(),
    }
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def made_with() -> dict[str, Any]:
    """What the last bits of a result depend on besides the numbers it is computed from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}


def restore(folder: Path, model: Any, optimizer: MasterAdamW) -> dict[str, Any]:
    """Put a saved state into a loaded policy.

    Returns:
        What it was made with, see ``made_with``.

    Raises:
        ConfigError: a file is missing or damaged, or does not belong to this model; nothing was changed.
    """
    state = _read_state(folder / STATE)
    weights = _read_tensors(folder / WEIGHTS / "model.safetensors")
    moments = _read_tensors(folder / OPTIMIZER)
    shapes = {name: tuple(master.shape) for name, master in optimizer.masters.items()}
    buffers = persistent_buffers(model)
    _check_same(
        folder / WEIGHTS / "model.safetensors",
        weights,
        shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()},
    )
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        kind, _, name = key.partition("/")
        by_parameter.setdefault(name, {})[kind] = tensor
    if by_parameter:  # empty before the first step
        for kind in ("exp_avg", "exp_avg_sq"):
            found = {name: kinds[kind] for name, kinds in by_parameter.items() if kind in kinds}
            _check_same(folder / OPTIMIZER, found, shapes, what=f"{kind} of ")
        _check_same(
            folder / OPTIMIZER,
            {name: kinds["step"] for name, kinds in by_parameter.items() if "step" in kinds},
            dict.fromkeys(shapes, ()),
            what="step of ",
        )

    with torch.no_grad():
        for name, master in optimizer.masters.items():
            master.copy_(weights[name])
        for name, buffer in buffers.items():
            buffer.copy_(weights[name])
    adamw_state = {
        index: {kind: tensor.clone() for kind, tensor in by_parameter[name].items()}
        for index, name in enumerate(optimizer.masters)
        if name in by_parameter
    }
    optimizer.adamw.load_state_dict(
        {"state": adamw_state, "param_groups": optimizer.adamw.state_dict()["param_groups"]}
    )
    optimizer.schedule_step = state["schedule_step"]
    _set_generators(state["generators"][0])
    optimizer.zero_grad()
    optimizer.refresh()
    return dict(state["made_with"])


def _generators() -> dict[str, str]:
    """State of torch's generators by device, base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{index}": value for index, value in enumerate(torch.cuda.get_rng_state_all())}
    return {device: base64.b64encode(value.numpy().tobytes()).decode() for device, value in states.items()}


def _set_generators(states: Mapping[str, str]) -> None:
    """Put saved states back; a device that this process does not have keeps none."""
    for device, text in states.items():
        value = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(value)
        elif int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, device)


def _moments(optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {
        f"{kind}/{name}": tensor.contiguous()
        for name, master in optimizer.masters.items()
        for kind, tensor in optimizer.adamw.state.get(master, {}).items()
    }


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} is not a saved policy: it has no {path.name}")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        known = (
            state["format"] == FORMAT
            and isinstance(state["schedule_step"], int)
            and state["generators"]
            and state["made_with"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as the state of a policy: {error!r}") from error
    if not known:
        raise ConfigError(f"{path} has format {state['format']!r}; expected {FORMAT}, with a step and generators")
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"the saved policy lacks {path}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _check_same(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], what: str = ""
) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise ConfigError(f"{path} belongs to another model: it lacks {what}{missing[0]} ({len(missing)} such tensors)")
    if extra:
        raise ConfigError(f"{path} belongs to another model: this one has no {extra[0]} ({len(extra)} such tensors)")
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise ConfigError(
                f"{path} belongs to another model: {what}{name} has shape {list(found[name].shape)}, "
                f"expected {list(shape)}"
            )
