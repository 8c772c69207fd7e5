"""The repeatable rows: every token is computed in a shape, a row and an order of sums that no other request can change.

Floating-point results depend on the shape of a product and on the place in it. So here

* a decode pass always holds one token of every row, taken or not; a prefill pass holds one chunk of one request, padded
  to a fixed length, on a fixed grid of positions;
* attention goes over blocks of a fixed number of positions, the same way in both passes. A block that a token does not
  see adds exact zeros to its sums, so it makes no difference how many of them there are, and the longest row in company
  changes nobody's bits;
* a request's row follows from its noise key, and it waits while that row is taken;
* a prompt's keys and values are taken over from another row only where prefill has computed them, chunk by chunk on the
  grid: they are the very bits that would be computed. What decoding has computed is never reused.

Equal bits hold on one machine, library build and number of threads. They cost speed: with 64 rows and SmolLM2's widths
the CPU time per token was 1.8 times that of ``packed``; in models so small that calls outweigh products it is 5 times.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch

from gymloop.errors import DataError
from gymloop.generation.decoder import Decoder
from gymloop.generation.engine import Sampling
from gymloop.generation.kv_cache import GROWTH, DenseCache, ScoreRule, Slots, visible
from gymloop.generation.rows import R, Ready

CHUNK = 64
"""Tokens of a prefill pass, and the grid on which prompts are cut."""
BLOCK = 128
"""Positions of an attention block."""
PASSES = 8
"""Prefill passes per step while rows decode."""


@dataclass(slots=True)
class FixedStep:
    """One pass: ``width`` tokens each of ``count`` rows from ``first`` on.

    Attributes:
        own: int64 [count, width], position up to which each token sees.
        position_ids: int64 [count * width], as the model sees them.
        slots: where the tokens lie in a layer's buffers.
        length: positions that some token sees; what lies beyond is not read.
    """

    first: int
    count: int
    width: int
    own: torch.Tensor
    position_ids: torch.Tensor
    slots: Slots
    length: int
    _hidden: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """Attention as ``Step.attend`` says, block by block; scores and sums are float32."""
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        batch = self.count * kv_heads
        rows = slice(self.first, self.first + self.count)
        keys, values = key[rows].flatten(0, 1), value[rows].flatten(0, 1)  # [batch, capacity, dim], views
        # [count, width, kv_heads, group, dim] -> [batch, group * width, dim]
        queries = query.reshape(self.count, self.width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(batch, group * self.width, dim)

        scores = []
        highest = torch.full((batch, group * self.width, 1), -torch.inf, dtype=torch.float32, device=query.device)
        for start in range(0, self.length, BLOCK):
            products = torch.bmm(queries, keys[:, start : start + BLOCK].transpose(1, 2)).float()
            block = rule.scores(products).view(self.count, kv_heads, group, self.width, BLOCK)
            block.masked_fill_(self._hides(start, rule.window), -torch.inf)
            block = block.view(batch, group * self.width, BLOCK)
            scores.append(block)
            highest = torch.maximum(highest, block.amax(dim=-1, keepdim=True))
        total = torch.zeros_like(highest)
        mixed = highest.new_zeros((batch, group * self.width, value.shape[3]))
        for index, block in enumerate(scores):
            weights = block.sub_(highest).exp_()
            total += weights.sum(dim=-1, keepdim=True)
            mixed += torch.bmm(weights.to(value.dtype), values[:, index * BLOCK : (index + 1) * BLOCK])
        mixed = mixed.div_(total).to(query.dtype).view(self.count, kv_heads, group, self.width, -1)
        return mixed.permute(0, 3, 1, 2, 4).reshape(tokens, heads, -1)

    def _hides(self, start: int, window: int | None) -> torch.Tensor:
        """What each token does not see of a block: bool [count, 1, 1, width, BLOCK]."""
        key = (start, window)
        if key not in self._hidden:
            kv = torch.arange(start, start + BLOCK, device=self.own.device)
            self._hidden[key] = ~visible(self.own[:, :, None], kv, window)[:, None, None]
        return self._hidden[key]


def row_of(sampling: Sampling, prompt: np.ndarray, rows: int, request_id: str) -> int:
    """The row a request is computed in, which follows from the request alone.

    ``slot`` names it where given. Else it follows from a key of the form ``<group>/<sample>/<turn>``: the samples of a
    group stand side by side, the turns of a rollout in one row; any other key is hashed whole. A request without a key
    is told apart by its seed and prompt, or, when greedy, by its prompt.

    Raises:
        DataError: the request draws random numbers and names neither a key nor a seed.
    """
    if sampling.slot is not None:
        return sampling.slot % rows
    key = sampling.noise_key
    if key is None:
        if sampling.seed is None and sampling.temperature > 0:
            raise DataError(
                f"request {request_id!r} names neither a noise key nor a seed; a deterministic engine needs one to "
                "repeat its draw"
            )
        return zlib.crc32(prompt.tobytes(), (sampling.seed or 0) & 0xFFFFFFFF) % rows
    group, _, rest = key.rpartition("/")[0].rpartition("/")
    if group and rest.isdecimal():
        return (zlib.crc32(group.encode()) + int(rest)) % rows
    return zlib.crc32(key.encode()) % rows


class FixedRows(Generic[R]):
    """``Rows`` that never move; see the module for what each pass looks like.

    Args:
        decoder: computes the passes.
        rows: requests at once, and tokens of a decode pass.
        max_len: tokens per row. Memory for all of them is taken at once: buffers that grow would change strides.
        passes: prefill passes per step while rows decode.
    """

    def __init__(self, decoder: Decoder, rows: int, max_len: int, passes: int = PASSES):
        self.prefilled = 0
        self.reused = 0
        self.in_step = (0, 0)
        self._decoder = decoder
        self._rows = rows
        self._max_len = max_len
        self._passes = passes
        # Beyond the tokens and the padding of a last chunk there is one position that idle rows write to.
        grid = -(-max_len // CHUNK) * CHUNK
        capacity = -(-(grid + 1) // GROWTH) * GROWTH
        self._idle_position = capacity - 1
        self._cache = DenseCache(rows, capacity)
        self._cache.reserve(capacity, 0, 0)
        self._tokens = np.full((rows, max_len), -1, dtype=np.int32)
        self._known = np.zeros(rows, dtype=np.int64)
        self._computed = np.zeros(rows, dtype=np.int64)
        self._prefill_end = np.zeros(rows, dtype=np.int64)
        self._offered = np.zeros(rows, dtype=np.int64)  # positions that prefill has computed, for others to take over
        self._owners: list[R | None] = [None] * rows
        self._order: list[int] = []  # rows with a request, oldest first

    @property
    def requests(self) -> Sequence[R]:
        """Requests that have a row."""
        return [owner for owner in self._owners if owner is not None]

    def admit(self, request: R) -> bool:
        """Give the request its row; it waits while that row is taken."""
        prompt = request.prompt
        row = row_of(request.sampling, prompt, self._rows, request.request_id)
        if self._owners[row] is not None:
            return False
        kept = self._whole_chunks(min(self._shared(prompt)[row], self._offered[row]), len(prompt))
        self._owners[row] = request
        self._order.append(row)
        self._tokens[row, : len(prompt)] = prompt
        self._tokens[row, len(prompt) :] = -1
        self._known[row] = self._prefill_end[row] = len(prompt)
        self._computed[row] = self._offered[row] = kept
        self.reused += kept
        return True

    def step(self) -> Sequence[Ready[R]]:
        """Some prefill passes, oldest request first, then a decode pass where a row decodes."""
        ready: list[Ready[R]] = []
        decoding = [row for row in self._order if self._computed[row] >= self._prefill_end[row]]
        passes = self._passes if decoding else 4 * self._passes
        for row in [row for row in self._order if self._computed[row] < self._prefill_end[row]]:
            logits = None
            while passes > 0 and self._computed[row] < self._prefill_end[row]:
                self._take_over(row)
                logits = self._prefill(row)
                passes -= 1
            if logits is not None and self._computed[row] == self._prefill_end[row]:
                ready.append(self._ready(logits, [row]))
        if decoding:
            ready.append(self._ready(self._decode(decoding)[decoding], decoding))
        return ready

    def append(self, ready: Ready[R], tokens: np.ndarray) -> None:
        """Add one drawn token to each row."""
        index = np.asarray(ready.rows, dtype=np.int64)
        self._tokens[index, self._known[index]] = tokens
        self._known[index] += 1

    def remove(self, leaving: Collection[R], broken: Collection[R] = ()) -> None:
        """Free the rows; what prefill computed stays on offer, but for broken requests."""
        gone = {id(request) for request in leaving}
        ruined = {id(request) for request in broken}
        for row in [row for row in self._order if id(self._owners[row]) in gone]:
            if id(self._owners[row]) in ruined:
                self._cache.clean(row)
                self._offered[row] = 0
            self._owners[row] = None
            self._order.remove(row)

    def forget(self) -> None:
        """The weights changed: every row starts over, its samples so far as if they were its prompt."""
        self._computed[:] = 0
        self._offered[:] = 0
        self._prefill_end[:] = self._known

    def clear(self) -> None:
        """Free all memory."""
        self._cache.clear()

    def _ready(self, logits: torch.Tensor, rows: Sequence[int]) -> Ready[R]:
        return Ready(logits, [owner for row in rows if (owner := self._owners[row]) is not None], rows)

    def _shared(self, prompt: np.ndarray) -> np.ndarray:
        """Length of the common prefix of the prompt with every row, int64 [rows]."""
        differs = self._tokens[:, : len(prompt)] != prompt
        return np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))

    def _whole_chunks(self, length: int, end: int) -> int:
        """How much of a prefix of ``length`` may be taken over: whole chunks, never the last of ``end`` tokens."""
        return min(int(length), end - 1) // CHUNK * CHUNK

    def _take_over(self, row: int) -> None:
        """Copy the chunks that another row's prefill has computed of the same tokens."""
        start, end = int(self._computed[row]), int(self._prefill_end[row])
        if self._whole_chunks(end, end) <= start:
            return
        offers = np.minimum(self._shared(self._tokens[row, :end]), self._offered)
        best = int(offers.argmax())
        reach = self._whole_chunks(offers[best], end)
        if reach > start:
            self._cache.copy_span(best, row, start, reach)
            self._computed[row] = self._offered[row] = reach
            self.reused += reach - start

    def _prefill(self, row: int) -> torch.Tensor:
        """Compute the next chunk of a row; logits [1, vocab] after its last token."""
        start = int(self._computed[row])
        count = min(CHUNK, int(self._prefill_end[row]) - start)
        self.in_step = (1, CHUNK)
        ids = np.zeros(CHUNK, dtype=np.int64)
        ids[:count] = self._tokens[row, start : start + count]
        positions = np.arange(start, start + CHUNK)
        tensor = self._decoder.tensor
        own = tensor(positions)
        step = FixedStep(
            first=row,
            count=1,
            width=CHUNK,
            own=own[None],
            # Padding may reach beyond the model's last position.
            position_ids=tensor(np.minimum(positions, self._max_len - 1)),
            slots=Slots(tensor(np.full(CHUNK, row)), own),
            length=start + CHUNK,
        )
        logits = self._decoder.forward(self._cache, step, ids, [count - 1])
        self._computed[row] = self._offered[row] = start + count
        self.prefilled += count
        return logits

    def _decode(self, decoding: Sequence[int]) -> torch.Tensor:
        """Compute one token of every row; logits [rows, vocab], of which idle rows' mean nothing."""
        self.in_step = (len(decoding), self._rows)
        ids = np.zeros(self._rows, dtype=np.int64)
        seen = np.zeros(self._rows, dtype=np.int64)
        written = np.full(self._rows, self._idle_position, dtype=np.int64)
        ids[decoding] = self._tokens[decoding, self._computed[decoding]]
        seen[decoding] = written[decoding] = self._computed[decoding]
        tensor = self._decoder.tensor
        position_ids = tensor(seen)
        step = FixedStep(
            first=0,
            count=self._rows,
            width=1,
            own=position_ids[:, None],
            position_ids=position_ids,
            slots=Slots(tensor(np.arange(self._rows)), tensor(written)),
            length=int(seen.max()) + 1,
        )
        logits = self._decoder.forward(self._cache, step, ids, range(self._rows))
        self._computed[decoding] += 1
        return logits
