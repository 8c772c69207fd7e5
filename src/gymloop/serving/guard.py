"""The sampling surface, whole: every field with which a client can change what is sampled, and what may stand in it.

Within a run the server is locked to a profile. A field that changes the distribution must then be absent or equal to
what the profile says, else the request is refused as ``off_profile``; an absent field takes the profile's value, never
the model folder's. Without a lock the engine's own fields may take any legal value, and what the engine cannot do is
refused as ``unsupported_field``. Nothing on this surface is ever ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gymloop.config.plan import SamplingProfile
from gymloop.generation.engine import Sampling
from gymloop.serving.fields import Fields, check_only, ranged, show, typed
from gymloop.serving.limits import Limits
from gymloop.serving.refusal import ApiError, token_ids

PROFILE_HEADER = "x-gymloop-profile"
UNCHANGED = SamplingProfile(temperature=1.0, top_p=1.0, top_k=None)
"""The model's own distribution."""


@dataclass(frozen=True, slots=True)
class SamplingProfiles:
    """The profiles of a run; ``validation`` None means that validation samples as training does."""

    train: SamplingProfile
    validation: SamplingProfile | None = None

    def select(self, mark: str | None) -> SamplingProfile:
        """The profile of a request, by its ``x-gymloop-profile`` header.

        Raises:
            ApiError: the header names no profile.
        """
        if mark in (None, "train"):
            return self.train
        if mark == "validation":
            return self.validation or self.train
        raise ApiError(400, "unknown_profile", f"{PROFILE_HEADER} is {mark!r}; expected train or validation")


@dataclass(frozen=True, slots=True)
class Does:
    """A field that the engine honours. ``off`` is what it is locked to; PROFILE: the profile's value."""

    kind: type
    off: Any
    good: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True, slots=True)
class Not:
    """A field that the engine does not honour: it may only hold a value that has no effect, the first being shown."""

    off: tuple[Any, ...] = ()


PROFILE = object()
SURFACE: dict[str, Does | Not] = {
    # The profile's own.
    "temperature": Does(float, PROFILE, lambda v: math.isfinite(v) and v >= 0, "0 or more"),
    "top_p": Does(float, PROFILE, lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": Does(int, PROFILE, lambda v: v is None or v >= 1, "at least 1, or -1 for all"),
    # What the engine can do beside.
    "min_p": Does(float, 0.0, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": Does(float, 1.0, lambda v: math.isfinite(v) and v > 0, "a number above 0"),
    "presence_penalty": Does(float, 0.0, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "frequency_penalty": Does(float, 0.0, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "logit_bias": Does(dict, {}, lambda v: True, "token ids and biases"),
    "n": Does(int, 1, lambda v: v >= 1, "at least 1"),
    "stop": Does(list, (), lambda v: True, "stop strings"),
    "stop_token_ids": Does(list, (), lambda v: True, "token ids"),
    "ignore_eos": Does(bool, False, lambda v: True, "true or false"),
    # Which tokens may be drawn.
    "typical_p": Not((1, 1.0)),
    "top_a": Not((0, 0.0)),
    "top_n_sigma": Not((0, 0.0, -1, -1.0)),
    "tfs": Not((1, 1.0)),
    "epsilon_cutoff": Not((0, 0.0)),
    "eta_cutoff": Not((0, 0.0)),
    "smoothing_factor": Not((0, 0.0)),
    "mirostat_mode": Not((0,)),
    "xtc_probability": Not((0, 0.0)),
    "dynatemp_range": Not((0, 0.0)),
    "allowed_token_ids": Not(([],)),
    "bad_words": Not(([],)),
    "bad_words_ids": Not(([],)),
    "logits_processors": Not(([],)),
    "custom_logit_processor": Not(),
    "vllm_xargs": Not(({},)),
    # What was said before weighs on what is drawn.
    "length_penalty": Not((1, 1.0)),
    "encoder_repetition_penalty": Not((1, 1.0)),
    "no_repeat_ngram_size": Not((0,)),
    "dry_multiplier": Not((0, 0.0)),
    # More than one sample is drawn and some are dropped, or none is drawn at all.
    "best_of": Not((1,)),
    "use_beam_search": Not((False,)),
    "num_beams": Not((1,)),
    "early_stopping": Not((False,)),
    "diversity_penalty": Not((0, 0.0)),
    "do_sample": Not((True,)),
    # A sample may not end where the model ends it.
    "min_tokens": Not((0,)),
    "min_length": Not((0,)),
    "min_new_tokens": Not((0,)),
    "thinking_token_budget": Not(),
    # Guided decoding, in every spelling.
    "response_format": Not(({"type": "text"},)),
    "guided_json": Not(),
    "guided_regex": Not(),
    "guided_choice": Not(),
    "guided_grammar": Not(),
    "guided_json_object": Not((False,)),
    "guided_decoding_backend": Not(),
    "guided_whitespace_pattern": Not(),
    "structured_outputs": Not(),
    "structural_tag": Not(),
    "json_schema": Not(),
    "grammar": Not(),
    "regex": Not(),
    "ebnf": Not(),
    "prediction": Not(),
    # A call may not be forced: that is guided decoding, too.
    "tool_choice": Not(("auto", "none")),
    "function_call": Not(("auto", "none")),
}
"""Every field that changes the distribution. A field that is neither here nor in a route's form is unknown: refused."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a request samples: checked values, of the profile where the request is silent.

    Attributes:
        stop: strings that end a sample; the engine knows tokens only, so the server looks for them.
        others: further arguments of ``Sampling``.
    """

    temperature: float
    top_p: float
    top_k: int | None
    n: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    others: Mapping[str, Any]

    def ends(self, end_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end a sample, given those that end a turn of the model."""
        return self.stop_token_ids if self.ignore_eos else (*end_token_ids, *self.stop_token_ids)

    def sampling(
        self, max_new_tokens: int, end_token_ids: tuple[int, ...], noise_key: str | None, index: int
    ) -> Sampling:
        """Arguments of the engine for sample ``index`` of ``n``; each has noise of its own."""
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.ends(end_token_ids),
            seed=self.seed if self.seed is None or index == 0 else (self.seed + index) % 2**63,
            noise_key=noise_key if noise_key is None or index == 0 else f"{noise_key}#{index}",
            **self.others,
        )


_HONOURED = {name: rule for name, rule in SURFACE.items() if isinstance(rule, Does)}
_OTHERS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def read_wish(given: Fields, profile: SamplingProfile | None, vocab_size: int, limits: Limits) -> Wish:
    """Check the sampling surface of a request.

    Args:
        given: its fields.
        profile: what it is locked to; None accepts whatever the engine can do.
        vocab_size: token ids are below it.
        limits: of ``n`` and stop strings.

    Raises:
        ApiError: 400, naming the field: ``off_profile``, ``unsupported_field``, ``invalid_type``, ``invalid_value``.
    """
    base = profile or UNCHANGED
    values: dict[str, Any] = {
        name: getattr(base, name) if rule.off is PROFILE else rule.off for name, rule in _HONOURED.items()
    }
    for name in given:
        rule = SURFACE.get(name)
        if rule is None:
            continue
        if isinstance(rule, Not):
            check_off(name, given[name], rule.off, locked=profile is not None)
            continue
        off = values[name]
        value = _read(given, name, rule, vocab_size)
        if profile is not None and value != off:
            raise _off_profile(name, given[name], off)
        if not rule.good(value):
            raise ApiError(400, "invalid_value", f"{name} is {show(given[name])}; expected {rule.expected}", name)
        values[name] = value
    for name, limit, count in (("n", limits.max_n, values["n"]), ("stop", limits.max_stop, len(values["stop"]))):
        if count > limit:
            raise ApiError(400, "too_many", f"{name} asks for {count}; this server takes {limit} at most", name)
    return Wish(
        temperature=float(values["temperature"]),
        top_p=float(values["top_p"]),
        top_k=values["top_k"],
        n=values["n"],
        seed=ranged(given, "seed", int, lambda v: -(2**63) <= v < 2**63, "a 64-bit integer"),
        stop=values["stop"],
        stop_token_ids=values["stop_token_ids"],
        ignore_eos=values["ignore_eos"],
        others={name: float(values[name]) for name in _OTHERS} | {"logit_bias": values["logit_bias"] or None},
    )


def _read(given: Fields, name: str, rule: Does, vocab_size: int) -> Any:
    """A field's value in the form in which values are compared and used."""
    match name:
        case "logit_bias":
            return _logit_bias(typed(given, name, dict), vocab_size)
        case "stop":
            return _strings(given[name])
        case "stop_token_ids":
            return token_ids(given, name, vocab_size)
        case "top_k":  # both mean "all tokens" in the APIs that clients know
            return None if (value := typed(given, name, int)) in (-1, 0) else value
    return typed(given, name, rule.kind)


def check_off(name: str, value: Any, off: tuple[Any, ...], locked: bool) -> None:
    """Refuse a value that would change the distribution in a way that the engine does not do.

    Raises:
        ApiError: 400 ``off_profile`` where the server is locked, else ``unsupported_field``.
    """
    if type(value) is str and any(type(good) in (int, float) for good in off):
        raise ApiError(400, "invalid_type", f"{name} is {show(value)} (text); expected a number", name)
    try:
        check_only(name, value, off)
    except ApiError:
        if locked:
            raise _off_profile(name, value, off[0] if off else "left out") from None
        raise


def _off_profile(name: str, value: Any, expected: Any) -> ApiError:
    shown = {"top_k": "all tokens (-1)"}.get(name, "none") if expected in (None, (), {}) else expected
    message = f"{name} is {show(value)}, but this server is locked to {name} {shown}; leave the field out"
    return ApiError(400, "off_profile", message, name)


def _strings(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ApiError(400, "invalid_type", f"stop is {show(value)}; expected text or a list of texts", "stop")
    return tuple(filter(None, found))


def _logit_bias(value: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not key.isdecimal() or int(key) >= vocab_size:
            message = f"logit_bias names token {show(key)}; this model's ids are 0..{vocab_size - 1}"
            raise ApiError(400, "invalid_value", message, "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            message = f"logit_bias of token {key} is {show(bias)}; expected a number from -100 to 100"
            raise ApiError(400, "invalid_value", message, "logit_bias")
        biases[int(key)] = float(bias)
    return biases
