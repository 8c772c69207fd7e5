"""What a server did between two looks at its counters, in one line that people can read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """A server's counters since it started.

    Attributes:
        samples: finished.
        prompt_tokens: of all prompts.
        tokens: sampled.
        refused: replies with an error.
        in_flight: requests being served now.
    """

    samples: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    refused: int = 0
    in_flight: int = 0


def summary(before: Traffic, now: Traffic, seconds: float) -> str:
    """Rates between two looks; empty where nothing was served and nothing is in flight."""
    samples, refused = now.samples - before.samples, now.refused - before.refused
    if not (samples or refused or now.in_flight):
        return ""
    tokens, prompt = now.tokens - before.tokens, now.prompt_tokens - before.prompt_tokens
    parts = [
        f"{samples} answered ({samples / seconds:.1f}/s)",
        f"{tokens / seconds:,.0f} tokens/s",
        f"{prompt / seconds:,.0f} prompt tokens/s",
        f"{now.in_flight} in flight",
    ]
    return ", ".join(parts + ([f"{refused} refused"] if refused else []))
