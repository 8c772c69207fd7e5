"""One GRPO step in gymloop and in TRL: the same model, prompts, reward, group size, lengths and optimizer.

    python benchmarks/step_vs_trl.py --trl-python TRL_VENV/bin/python                # both comparisons, 3 timed steps
    python benchmarks/step_vs_trl.py --trl-python TRL_VENV/bin/python --curve --seeds 4   # 10 steps, reward curves

TRL lives in a virtual environment of its own (``pip install torch trl==1.16.0``). Each side runs in a fresh process
with the same number of threads, one after the other. The first step of each is not timed. Both sample at temperature 1
from the same 8 prompts, 8 completions of at most 32 tokens each; what was sampled differs, so tokens are printed beside
times.

``generate`` is everything from prompts to sampled tokens. ``train`` is everything else of a step: logprobs, loss,
backward, optimizer, and in gymloop handing the new weights to the engine.

Comparisons: float32 on both sides; gymloop at its default precision against the fastest of TRL in float32, under
bfloat16 autocast and with bfloat16 weights, which a small piece of the work decides.

Reward curves: each seed gives the mean reward of the last three of 10 steps on both sides; "not worse" means that the
mean difference over the seeds is not below zero by more than two of its standard errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUPS, GENERATIONS, NEW_TOKENS = 8, 8, 32
QUESTIONS = (
    "A shop sells pens at 3 coins each and notebooks at 7 coins each. How many coins do 14 pens and 5 notebooks cost "
    "together? Give the number.",
    "Count from 1 to 20, and write the numbers in digits, separated by commas, without any other word before or after.",
    "A train leaves at 9:15 and arrives at 11:40. It stops twice on its way, for 5 minutes each time. How many minutes "
    "does the journey take, and for how many of them does the train move?",
    "List the first eight square numbers, starting from 1. Write only the numbers, one after the other, with a comma "
    "between them, and then write the sum of all eight.",
    "There are 24 hours in a day and 60 minutes in an hour, and there are 7 days in a week. How many minutes are there "
    "in one day, and how many in one week? Show both products and their results, and write every number in digits.",
    "Tom has 45 marbles, gives 17 to Ann and then finds 8 more on his way home. Ann had 12 marbles before, and loses 3 "
    "of them in the grass. How many marbles does Tom have now, how many does Ann have, and how many do they have "
    "together?",
    "Write the year in which the first man walked on the moon, the year in which the Second World War ended, and the "
    "year in which the Berlin Wall fell. Then write how many years lie between the first and the last of them.",
    "A rectangle is 12 metres long and 7 metres wide, and a square has sides of 9 metres. What are the perimeter and "
    "the area of each? Answer with four numbers, first the perimeter of the rectangle in metres, then its area in "
    "square metres, then the same for the square, and do not explain how you found them.",
)


def digit_share(text: str) -> float:
    """The reward of both sides: the share of characters that are digits, in [0, 1]."""
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


# ---------------------------------------------------------------- sides, each in its own process


def gymloop_side(task: dict) -> dict:
    import torch
    from transformers import AutoTokenizer

    from gymloop.algorithms.step import prepare_batch
    from gymloop.config.schema import Grpo, Loss, OptimizerKwargs, Rollouts
    from gymloop.generation.engine import Sample, Sampling
    from gymloop.generation.torch_engine import TorchEngine
    from gymloop.policy.spec import PolicySpec
    from gymloop.policy.worker import PolicyWorker
    from gymloop.rollouts.trajectory import Group, Trajectory, Turn
    from gymloop.tokens.renderer import generation_end_ids

    torch.set_num_threads(task["threads"])
    folder = task["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in task["prompts"]]
    grpo = Grpo(
        num_prompts_per_step=task["groups"],
        num_generations_per_prompt=task["generations"],
        max_num_steps=task["steps"],
        use_leave_one_out_baseline=False,
        normalize_rewards=True,
    )
    loss = Loss()
    spec = PolicySpec(
        folder,
        1.0,
        loss,
        OptimizerKwargs(lr=task["lr"], weight_decay=0.0),
        precision=task["precision"],
        device=task["device"],
        seed=task["seed"],
    )
    worker = PolicyWorker(spec)
    info = worker.load()
    engine = TorchEngine(
        folder,
        dtype=info["precision"],
        device=task["device"],
        max_batch_size=task["groups"] * task["generations"],
        max_model_len=max(map(len, prompts)) + task["new_tokens"],
        seed=task["seed"],
    )
    sampling = Sampling(max_new_tokens=task["new_tokens"], stop_token_ids=generation_end_ids(folder))

    async def sample(step: int) -> list[Sample]:
        calls = [
            engine.generate(prompt, sampling, f"{step}/{group}/{index}")
            for group, prompt in enumerate(prompts)
            for index in range(task["generations"])
        ]
        return await asyncio.gather(*calls)

    steps = []
    for step in range(task["steps"]):
        begin = time.perf_counter()
        samples = asyncio.run(sample(step))
        generated = time.perf_counter()
        rewards = [digit_share(tokenizer.decode(one.token_ids, skip_special_tokens=True)) for one in samples]
        groups = []
        for group, prompt in enumerate(prompts):
            own = range(group * task["generations"], (group + 1) * task["generations"])
            trajectories = []
            for index, number in enumerate(own):
                one = samples[number]
                turn = Turn(prompt, one.token_ids, one.logprobs, one.finish_reason, step, step)
                trajectories.append(Trajectory(str(group), index, 0, (turn,), rewards[number]))
            groups.append(Group(str(group), tuple(trajectories)))
        metrics = worker.train(prepare_batch(groups, grpo, loss, Rollouts()).batch)
        trained = time.perf_counter()
        engine.load_weights(worker.snapshot(), step + 1)
        end = time.perf_counter()
        steps.append(
            {
                "generate": generated - begin,
                "train": end - generated,
                "sync": end - trained,
                "reward": statistics.fmean(rewards),
                "sampled": sum(len(one.token_ids) for one in samples),
                "tokens": metrics["tokens/unpacked"],
                "computed": metrics["tokens/packed"],
                "mismatch": metrics["mismatch/max_abs_logprob_diff"],
                **{name: metrics[f"timing/{name}_s"] for name in ("forward", "backward", "optimizer")},
            }
        )
        print(f"gymloop {info['precision']} step {step}: {steps[-1]}", file=sys.stderr, flush=True)
    engine.close()
    return {"precision": info["precision"], "steps": steps}


def trl_side(task: dict) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(task["threads"])
    steps: list[dict] = []
    now: dict = {}

    def reward(completions: list[str], completion_ids: list[list[int]], **columns) -> list[float]:
        rewards = [digit_share(text) for text in completions]
        now["reward"] = statistics.fmean(rewards)
        now["sampled"] = sum(map(len, completion_ids))
        return rewards

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            begin = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            now["generate"] = now.get("generate", 0.0) + time.perf_counter() - begin
            return result

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            now.clear()
            now["begin"] = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            total = time.perf_counter() - now.pop("begin")
            steps.append({**now, "train": total - now["generate"]})
            print(f"trl {task['precision']} step {len(steps) - 1}: {steps[-1]}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=task["device"] == "cpu",
            bf16=task["precision"] == "autocast",
            model_init_kwargs={"dtype": "bfloat16" if task["precision"] == "bfloat16" else "float32"},
            per_device_train_batch_size=task["micro"],
            gradient_accumulation_steps=task["groups"] * task["generations"] // task["micro"],
            num_generations=task["generations"],
            max_completion_length=task["new_tokens"],
            max_steps=task["steps"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=task["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,  # its default, True, would only make it slower
            loss_type="dapo",
            scale_rewards="group",
            seed=task["seed"],
            logging_steps=1000,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Timed(
            model=task["model"],
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": task["prompts"]}),
            processing_class=AutoTokenizer.from_pretrained(task["model"], padding_side="left"),
            callbacks=[Watch()],
        )
        trainer.train()
    return {"precision": task["precision"], "steps": steps}


# ---------------------------------------------------------------- comparison


def run_side(side: str, python: str, task: dict, limit_s: float) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": str(task["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [python, __file__, "--side", side, "--task", json.dumps(task), "--answer", str(answer)]
        subprocess.run(command, check=True, timeout=limit_s, env=environment)
        return json.loads(answer.read_text(encoding="utf-8"))


def median(result: dict, phase: str) -> float:
    timed = result["steps"][1:] or result["steps"]
    return statistics.median(step[phase] for step in timed)


def total(result: dict) -> float:
    return median(result, "generate") + median(result, "train")


def show(name: str, result: dict) -> None:
    last = result["steps"][-1]
    print(
        f"  {name:24s} {total(result):7.2f} s = generate {median(result, 'generate'):6.2f} "
        f"+ train {median(result, 'train'):6.2f}   ({median(result, 'sampled'):.0f} tokens sampled)"
    )
    if "computed" in last:
        print(
            f"  {'':24s} train: forward {median(result, 'forward'):.2f}, backward {median(result, 'backward'):.2f}, "
            f"optimizer {median(result, 'optimizer'):.2f}, sync {median(result, 'sync'):.2f}; "
            f"{median(result, 'computed'):.0f} of {median(result, 'tokens'):.0f} tokens computed; "
            f"largest engine/trainer difference {max(step['mismatch'] for step in result['steps']):.1e}"
        )


def compare(title: str, ours: dict, theirs: dict, goal: float) -> bool:
    print(f"{title}: one step, median of {max(1, len(ours['steps']) - 1)} after 1 untimed")
    show(f"gymloop {ours['precision']}", ours)
    show(f"trl {theirs['precision']}", theirs)
    ratio = total(theirs) / total(ours)
    split = ", ".join(f"{phase} {median(theirs, phase) / median(ours, phase):.2f}" for phase in ("generate", "train"))
    print(f"  ratio {ratio:.2f} ({split}); goal {goal:.1f}: {'met' if ratio >= goal else 'missed'}\n")
    return ratio >= goal


def compare_curves(pairs: list[tuple[dict, dict]]) -> bool:
    """``pairs`` holds our run and theirs for each seed."""
    print("reward by step")
    ends: list[tuple[float, float]] = []
    for seed, pair in enumerate(pairs):
        last_three = []
        for name, result in zip(("gymloop", "trl"), pair, strict=True):
            rewards = [step["reward"] for step in result["steps"]]
            last_three.append(statistics.fmean(rewards[-3:]))
            shown = " ".join(f"{reward:.3f}" for reward in rewards)
            print(f"  {f'{name}, run {seed}':15s} {shown}   last three {last_three[-1]:.3f}")
        ends.append((last_three[0], last_three[1]))
    difference = statistics.fmean(ours - theirs for ours, theirs in ends)
    means = [statistics.fmean(side) for side in zip(*ends, strict=True)]
    print(f"  last three, mean over {len(ends)} seeds: gymloop {means[0]:.3f}, trl {means[1]:.3f}", end="")
    if len(ends) == 1:
        print("; one seed does not tell a difference from noise: give --seeds\n")
        return difference >= 0
    error = statistics.stdev(ours - theirs for ours, theirs in ends) / len(ends) ** 0.5
    met = difference >= -2 * error
    print(f"; difference {difference:+.3f}, standard error {error:.3f}; not worse: {'met' if met else 'missed'}\n")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter of the virtual environment that holds TRL")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hugging Face id")
    parser.add_argument("--mode", choices=("float32", "both"), default="both")
    parser.add_argument("--curve", action="store_true", help="10 steps, and compare the reward curves (float32)")
    parser.add_argument("--steps", type=int, default=4, help="steps per run, the first untimed")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="sequences per microbatch of TRL")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="runs per side with --curve")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="wall time of one side, seconds")
    parser.add_argument("--side", choices=("gymloop", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side = gymloop_side if options.side == "gymloop" else trl_side
        options.answer.write_text(json.dumps(side(json.loads(options.task))), encoding="utf-8")
        return 0
    if not options.trl_python:
        parser.error("--trl-python is needed")
    if not 1 <= options.groups <= len(QUESTIONS):
        parser.error(f"--groups must be from 1 to {len(QUESTIONS)}")

    from transformers import AutoTokenizer

    from gymloop.compat import settle_precision
    from gymloop.models.resolve import resolve_model

    folder = str(resolve_model(options.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in QUESTIONS[: options.groups]
    ]
    lengths = [len(tokenizer(text)["input_ids"]) for text in prompts]
    print(
        f"{options.groups} prompts of {min(lengths)} to {max(lengths)} tokens, {options.generations} completions of at "
        f"most {options.new_tokens}; {options.threads} threads; load average {os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    task = {
        "model": folder,
        "prompts": prompts,
        "groups": options.groups,
        "generations": options.generations,
        "new_tokens": options.new_tokens,
        "micro": options.trl_micro_batch,
        "lr": options.lr,
        "seed": options.seed,
        "device": options.device,
        "threads": options.threads,
        "steps": 10 if options.curve else options.steps,
    }

    def ours(precision: str, seed: int = options.seed) -> dict:
        return run_side("gymloop", sys.executable, task | {"precision": precision, "seed": seed}, options.limit_s)

    def theirs(precision: str, seed: int = options.seed) -> dict:
        return run_side("trl", options.trl_python, task | {"precision": precision, "seed": seed}, options.limit_s)

    trl_float32 = theirs("float32")
    gymloop_float32 = ours("float32")
    met = compare("float32 on both sides", gymloop_float32, trl_float32, 1.4)
    if options.curve:
        pairs = [(gymloop_float32, trl_float32)]
        for seed in range(options.seed + 1, options.seed + options.seeds):
            pairs.append((ours("float32", seed), theirs("float32", seed)))
        met &= compare_curves(pairs)
    elif options.mode == "both":
        fastest = trl_fastest(options, task)
        best = trl_float32 if fastest == "float32" else theirs(fastest)
        default = gymloop_float32 if settle_precision("auto", options.device) == "float32" else ours("auto")
        met &= compare("default precision against TRL's best", default, best, 2.0)
    return 0 if met else 1


def trl_fastest(options: argparse.Namespace, task: dict) -> str:
    """TRL's fastest precision on a small piece of the work: without native bfloat16 two of the three take minutes."""
    small = task | {"prompts": task["prompts"][:2], "groups": 2, "generations": 2, "new_tokens": 4, "micro": 4}
    times = {
        precision: total(
            run_side("trl", options.trl_python, small | {"steps": 2, "precision": precision}, options.limit_s)
        )
        for precision in ("float32", "autocast", "bfloat16")
    }
    shown = ", ".join(f"{precision} {seconds:.2f} s" for precision, seconds in times.items())
    print(f"TRL by precision, 2 prompts x 2 completions of 4 tokens: {shown}\n", flush=True)
    return min(times, key=lambda precision: times[precision])


if __name__ == "__main__":
    sys.exit(main())
