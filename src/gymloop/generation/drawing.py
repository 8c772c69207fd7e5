"""From requests to draws: gathers what each row asks for into tensors, and nothing that no row asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gymloop.generation.request import Request
from gymloop.generation.sampling import Bias, Filters, Penalties, draw


class Drawer:
    """Draws the next token of requests.

    Args:
        vocab: size of the model's vocabulary.
        device: where logits are.
        seed: of the stream for requests that name no seed and no key, and of the noise of those that name a key only.
        one_by_one: draw every row in a pass of its own, so that the shapes do not follow from the company.
    """

    def __init__(self, vocab: int, device: torch.device, seed: int, one_by_one: bool):
        self._vocab = vocab
        self._device = device
        self._seed = seed
        self._one_by_one = one_by_one
        self._stream = torch.Generator().manual_seed(seed)

    def draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
        """One token and its logprob for each request.

        Args:
            logits: float32 [m, vocab], overwritten.
            requests: m of them.
        """
        if not self._one_by_one or len(requests) == 1:
            return self._draw(logits, requests)
        tokens: list[int] = []
        logprobs: list[float] = []
        for index, request in enumerate(requests):
            token, logprob = self._draw(logits[index : index + 1], [request])
            tokens += token
            logprobs += logprob
        return tokens, logprobs

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
        tokens, logprobs = draw(logits, self._filters(requests), self._uniform(requests).to(self._device))
        return tokens.tolist(), logprobs.tolist()

    def _uniform(self, requests: Sequence[Request]) -> torch.Tensor:
        """One number per row, from the request's own seed and key where it has one."""
        numbers = [request.uniform(self._seed) for request in requests]
        if None in numbers:
            stream = torch.rand(len(numbers), generator=self._stream, dtype=torch.float64).tolist()
            numbers = [drawn if own is None else own for own, drawn in zip(numbers, stream, strict=True)]
        return torch.tensor(numbers, dtype=torch.float64)

    def _filters(self, requests: Sequence[Request]) -> Filters:
        samplings = [request.sampling for request in requests]
        top_p = top_k = min_p = None
        if any(sampling.top_p < 1 for sampling in samplings):
            top_p = self._numbers([sampling.top_p for sampling in samplings])
        if any(sampling.top_k is not None for sampling in samplings):
            limits = [self._vocab if sampling.top_k is None else sampling.top_k for sampling in samplings]
            top_k = torch.tensor(limits, device=self._device)
        if any(sampling.min_p > 0 for sampling in samplings):
            min_p = self._numbers([sampling.min_p for sampling in samplings])
        temperature = self._numbers([sampling.temperature for sampling in samplings])
        return Filters(temperature, top_p, top_k, min_p, self._bias(requests), self._penalties(requests))

    def _bias(self, requests: Sequence[Request]) -> Bias | None:
        entries = [
            (row, token, value)
            for row, request in enumerate(requests)
            if request.sampling.logit_bias
            for token, value in request.sampling.logit_bias.items()
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        index = torch.tensor([rows, tokens], device=self._device)
        return Bias(index[0], index[1], self._numbers(values))

    def _penalties(self, requests: Sequence[Request]) -> Penalties | None:
        chosen = [(row, request) for row, request in enumerate(requests) if request.sampling.penalises]
        if not chosen:
            return None
        samplings = [request.sampling for _, request in chosen]
        return Penalties(
            rows=torch.tensor([row for row, _ in chosen], device=self._device),
            repetition=self._numbers([sampling.repetition_penalty for sampling in samplings]),
            presence=self._numbers([sampling.presence_penalty for sampling in samplings]),
            frequency=self._numbers([sampling.frequency_penalty for sampling in samplings]),
            prompt=self._padded([request.prompt for _, request in chosen]),
            sampled=self._padded([request.token_ids for _, request in chosen]),
        )

    def _numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _padded(self, ids: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
        """Int64 [rows, longest], padded with the vocabulary size."""
        array = np.full((len(ids), max(map(len, ids))), self._vocab, dtype=np.int64)
        for row, values in zip(array, ids, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(array).to(self._device)
