"""What a weight sync costs: seconds, rate, share of what this machine copies, ratio to a plain tensor through Ray.

    python benchmarks/sync.py [--shape smollm2-135m] [--device cpu] [--transport shared_memory ...] [--rounds 5]
                              [--baseline-rounds 2]

Policy and engine are Ray actors with random weights of the shape's sizes; the engine copies them into parameters of
its own. Everything is the product's own code (``sync_weights``, the sender, the receiver) but the model. The baseline
of the same run is a plain tensor through Ray: the policy's actor returns one flat tensor, the engine's copies it. The
first sync of each transport, which also makes its memory or its group and compares checksums, is printed apart.
``--device cuda`` wants one GPU for both actors (``cuda_ipc``) or one for each (``broadcast``).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.local import RayCluster
from gymloop.training.sync import SyncSettings, sync_weights

TRANSPORTS = {"cpu": ("shared_memory", "object_store", "broadcast"), "cuda": ("cuda_ipc", "broadcast", "shared_memory")}
SHAPES = {
    # vocabulary, width, layers, feed-forward width, key-value width, query width, tied
    "smollm2-135m": (49152, 576, 30, 1536, 192, 576, True),
    "half-b": (151936, 896, 24, 4864, 128, 896, True),
    "qwen3-1.7b": (151936, 2048, 28, 6144, 1024, 2048, True),
    "qwen3-4b": (151936, 2560, 36, 9728, 1024, 4096, True),
}
LIMIT_S = 600.0


def sizes(shape: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, as Hugging Face calls them."""
    vocabulary, width, layers, inner, kv, query, tied = SHAPES[shape]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, query),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        found |= {f"model.layers.{layer}.{name}.weight": one for name, one in block.items()}
    found["model.norm.weight"] = (width,)
    if not tied:
        found["lm_head.weight"] = (vocabulary, width)
    return found


def parameters(shape: str, device: str, dtype: str) -> dict[str, Any]:
    """Random weights."""
    import torch

    torch.manual_seed(os.getpid())
    kind = getattr(torch, dtype)
    return {name: torch.empty(one, dtype=kind, device=device).uniform_(-1, 1) for name, one in sizes(shape).items()}


class Policy:
    """The parameters and the product's sender."""

    def __init__(self, shape: str, device: str, dtype: str) -> None:
        from gymloop.weights.sender import WeightSender

        self.device = device
        self.weights = parameters(shape, device, dtype)
        self.sender = WeightSender(self.weights.items, device)

    def place(self) -> Any:
        from gymloop.weights.place import here

        return here(self.device)

    def offer_weights(self, request: Any) -> Any:
        return self.sender.offer(request)

    def release_weights(self, complete: bool) -> dict[str, float]:
        return self.sender.release(complete)

    def flat(self) -> Any:
        """The baseline: one tensor on the host."""
        import torch

        return torch.cat([one.view(-1) for one in self.weights.values()]).cpu()

    def sums(self) -> tuple[int, ...]:
        from gymloop.weights.checksum import checksums

        return checksums(self.weights.items())


class Engine:
    """Parameters of the same shape and the product's receiver."""

    def __init__(self, shape: str, device: str, dtype: str) -> None:
        from gymloop.weights.receiver import WeightReceiver

        self.weights = parameters(shape, device, dtype)
        self.receiver = WeightReceiver(device)

    def sync_state(self) -> Any:
        from gymloop.weights.place import here

        return here(self.receiver.device), self.receiver.version

    def load_weights(self, offer: Any, version: int, rank: int) -> None:
        with self.receiver.opened(offer, version, rank) as source:
            for piece in source.pieces():
                flat = self.weights[piece.entry.name].view(-1)
                flat[piece.begin : piece.begin + piece.values.numel()].copy_(piece.values)

    def load_flat(self, flat: Any) -> None:
        """The baseline."""
        begin = 0
        for one in self.weights.values():
            one.view(-1).copy_(flat[begin : begin + one.numel()])
            begin += one.numel()

    def sums(self) -> tuple[int, ...]:
        from gymloop.weights.checksum import checksums

        return checksums(self.weights.items())


async def measure(args: argparse.Namespace) -> None:
    logs = Path(tempfile.mkdtemp(prefix="gymloop-bench-"))
    env = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    gpus = 0.0 if args.device == "cpu" else args.gpus_per_actor
    make = partial(RayRemote, env=env, num_gpus=gpus)
    build = (args.shape, args.device, args.dtype)
    policy = make("policy", partial(Policy, *build), log_file=logs / "policy.log")
    engine = make("engine", partial(Engine, *build), log_file=logs / "engine.log")
    baseline = []
    for _ in range(args.baseline_rounds + 1 if args.baseline_rounds else 0):
        began = time.perf_counter()
        await engine.call("load_flat", policy.refer("flat"), timeout=LIMIT_S)
        baseline.append(time.perf_counter() - began)
    base = statistics.median(baseline[1:]) if baseline else math.nan
    print(f"a plain tensor through Ray (baseline)  {base:7.3f} s", flush=True)
    version = 0
    for transport in args.transport or TRANSPORTS[args.device]:
        settings = SyncSettings(transport, int(args.bucket_mb * 1e6), "first")
        always = SyncSettings(transport, int(args.bucket_mb * 1e6), "always")
        taken = []
        first = await sync_weights(policy, [engine], version, LIMIT_S, always)
        for _ in range(args.rounds):
            version += 1
            taken.append(await sync_weights(policy, [engine], version, LIMIT_S, settings))
        version += 1
        if await policy.call("sums", timeout=LIMIT_S) != await engine.call("sums", timeout=LIMIT_S):
            raise SystemExit(f"{transport}: the engine has other weights than the policy")
        seconds = statistics.median(one["weights/sync_s"] for one in taken)
        rate = taken[0]["weights/bytes"] / seconds
        limit = rate * seconds / taken[0]["weights/sync_s"] / taken[0]["weights/copy_limit_share"]
        print(
            f"{transport:<38} {seconds:7.3f} s  {rate / 1e9:6.2f} GB/s  {rate / limit:5.2f} of the copy limit "
            f"({limit / 1e9:.2f} GB/s)  {base / seconds:5.2f} x the baseline  first {first['weights/sync_s']:.3f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", choices=TRANSPORTS, default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--transport", action="append", choices=sorted({*TRANSPORTS["cpu"], *TRANSPORTS["cuda"]}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--baseline-rounds", type=int, default=2, help="0 measures no baseline: it is slow for large shapes"
    )
    parser.add_argument("--bucket-mb", type=float, default=512.0)
    parser.add_argument("--gpus-per-actor", type=float, default=0.5, help="1 puts policy and engine on a GPU each")
    args = parser.parse_args()
    count = sum(math.prod(one) for one in sizes(args.shape).values())
    nbytes = count * (2 if args.dtype == "bfloat16" else 4)
    load = os.getloadavg()[0]
    print(
        f"{args.shape}: {count / 1e6:.0f} M parameters, {nbytes / 1e6:.0f} MB of {args.dtype} on {args.device}; "
        f"load of the machine {load:.1f}"
    )
    cluster = RayCluster(num_cpus=len(os.sched_getaffinity(0)))
    cluster.connect()
    try:
        asyncio.run(measure(args))
    finally:
        cluster.disconnect()


if __name__ == "__main__":
    main()
