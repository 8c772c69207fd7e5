"""Where every derived value comes from: the keys it is made of, each with its value and the line that set it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymloop.config.document import Document
from gymloop.config.load import Loaded
from gymloop.config.plan import Plan
from gymloop.config.problems import KeyPath, locate
from gymloop.config.schema import EnvironmentSpec, Recipe


@dataclass(frozen=True, slots=True)
class Derived:
    """A value of the Plan.

    Attributes:
        name: the Plan's field.
        value: as a person reads it.
        because: the keys and facts it follows from.
    """

    name: str
    value: str
    because: str


def derived(loaded: Loaded, plan: Plan) -> list[Derived]:
    """Every value that the Plan adds to the recipe, in the Plan's order."""
    terms = _Terms(loaded)
    recipe, term = plan.recipe, terms.term
    prompts, generations = term("grpo.num_prompts_per_step"), term("grpo.num_generations_per_prompt")
    cores = f"{plan.cores} cores that this process may use; engine and policy take turns"
    engine_cores = cores
    if plan.placement.replicas > 1 and plan.placement.resource == "CPU":
        engine_cores = f"{plan.cores} cores that this process may use / {plan.placement.replicas} replicas"
    folder = f"the folder of {plan.recipe_path.name}"
    template = plan.recipe.policy.tokenizer.chat_template
    found = [
        Derived("rollouts_per_step", str(plan.rollouts_per_step), f"{prompts} x {generations}"),
        Derived(
            "optimizer_steps_per_batch",
            str(plan.optimizer_steps_per_batch),
            f"rollouts_per_step / {term('policy.train_global_batch_size')}"
            if recipe.policy.train_global_batch_size
            else f"{term('policy.train_global_batch_size')}: one step of each batch",
        ),
        Derived("steps_bound", str(plan.steps_bound), _steps(terms, plan, prompts)),
        Derived(
            "train_sampling",
            _sampling(plan.train_sampling),
            ", ".join(term(f"policy.generation.{key}") for key in ("temperature", "top_p", "top_k")),
        ),
    ]
    if plan.validation_sampling is not None:
        keys = ("temperature", "top_p", "top_k")
        generation = recipe.policy.generation
        own = [f"val_{key}" if getattr(generation, f"val_{key}") is not None else key for key in keys]
        found.append(
            Derived(
                "validation_sampling",
                _sampling(plan.validation_sampling),
                ", ".join(term(f"policy.generation.{key}") for key in own),
            )
        )
    found += [
        Derived("device", plan.device, term("cluster.gpus_per_node")),
        Derived("precision", plan.precision, term("policy.precision")),
        Derived("placement", plan.placement.summary(), _placement(terms, plan)),
        Derived("engine.threads", str(plan.engine.threads), engine_cores),
        Derived("policy.threads", str(plan.policy.threads), cores),
        Derived(
            "ports",
            f"{plan.ports.low}-{plan.ports.high}",
            f"{term('policy.generation.port_range_low')}, {term('policy.generation.port_range_high')}",
        ),
        Derived(
            "chat_template",
            "the tokenizer's own" if plan.chat_template is None else f"{len(plan.chat_template)} characters",
            term("policy.tokenizer.chat_template") if template is None or len(template) < 80 else "given in the recipe",
        ),
        Derived("train", rows(plan.train), _source(terms, "data.train", folder)),
        *(
            Derived(f"environment {name}", environment(spec), _environment(terms, name, spec))
            for name, spec in recipe.env.environments.items()
        ),
    ]
    if plan.validation is not None:
        found.append(Derived("validation", rows(plan.validation), _source(terms, "data.validation", folder)))
    if plan.sft_data_path is not None:
        found.append(Derived("sft_data_path", str(plan.sft_data_path), f"{term('sft_warmup.data_path')} in {folder}"))
    found.append(
        Derived("run_dir", str(plan.run_dir), f"{term('logger.log_dir')} / name of the recipe / name of the run")
    )
    return found


def rows(source: Any) -> str:
    """A RowSource in words."""
    if source.data_path is not None:
        return str(source.data_path)
    return f"{source.num_tasks} tasks of {source.environment}, seed {source.seed}"


def environments(recipe: Recipe) -> list[str]:
    """Each environment with what it is."""
    return [f"{name} ({environment(spec)})" for name, spec in recipe.env.environments.items()]


def environment(spec: EnvironmentSpec) -> str:
    """A class, or a server with the agent that plays on it."""
    return f"class {spec.entrypoint}" if spec.url is None else f"server {spec.url}, {spec.agent} agent"


def origin(document: Document, path: KeyPath) -> str:
    """The line that set a key, with the expression if it was computed; ``default`` where nobody set it."""
    value: Any = document.value
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return "default"
        value = value[part]
    where = locate(path, document.positions) or "recipe"
    around = (path[:length] for length in range(len(path), 0, -1))
    expression = next((document.expressions[part] for part in around if part in document.expressions), None)
    return where if expression is None else f"{where}, {expression}"


class _Terms:
    """Keys as they appear in a derivation."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def term(self, key: str) -> str:
        """``grpo.seed 42 (recipes/a.yaml:3)``; a value of the environment is not shown."""
        path = tuple(key.split("."))
        value: Any = self.loaded.recipe
        for part in path:
            value = getattr(value, part)
        shown = "" if path in self.loaded.recipe.from_environment else f" {_shown(value)}"
        return f"{key}{shown} ({origin(self.loaded.document, path)})"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _steps(terms: _Terms, plan: Plan, prompts: str) -> str:
    steps, tasks = terms.term("grpo.max_num_steps"), plan.train.num_tasks
    if tasks is None:
        return f"{steps}; the file's rows may end the run sooner"
    epochs = f"{terms.term('grpo.max_num_epochs')} x whole steps in {terms.term('data.train.num_tasks')} by {prompts}"
    return f"the smaller of {steps} and {epochs}"


def _placement(terms: _Terms, plan: Plan) -> str:
    generation = "policy.generation"
    if plan.placement.resource == "CPU":
        return f"{terms.term('cluster.gpus_per_node')}, {terms.term(f'{generation}.replicas')}"
    keys = ["cluster.gpus_per_node", "cluster.num_nodes", f"{generation}.colocated.enabled"]
    if not plan.placement.colocated:
        kept = "gpus_per_node" if plan.recipe.cluster.num_nodes == 1 else "num_nodes"
        keys.append(f"{generation}.colocated.resources.{kept}")
    tensor_parallel = f", {plan.placement.tensor_parallel} GPUs an engine" if plan.placement.tensor_parallel > 1 else ""
    return ", ".join(terms.term(key) for key in keys) + tensor_parallel


def _environment(terms: _Terms, name: str, spec: EnvironmentSpec) -> str:
    keys = ("entrypoint",) if spec.url is None else ("url", "agent")
    path = ("env", "environments", name)
    return ", ".join(f"{'.'.join((*path, key))} ({origin(terms.loaded.document, (*path, key))})" for key in keys)


def _sampling(profile: Any) -> str:
    return f"temperature {profile.temperature}, top_p {profile.top_p}, top_k {_shown(profile.top_k)}"


def _source(terms: _Terms, key: str, folder: str) -> str:
    source: Any = terms.loaded.recipe.data
    source = getattr(source, key.rpartition(".")[2])
    if source.data_path is not None:
        return f"{terms.term(f'{key}.data_path')} in {folder}"
    return ", ".join(terms.term(f"{key}.{name}") for name in ("environment", "num_tasks", "seed"))
