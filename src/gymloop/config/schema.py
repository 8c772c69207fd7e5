"""What a recipe may say. Unknown keys are errors, and every value has its type before anything starts.

Names follow NeMo RL where it has the concept. This module imports neither torch nor ray nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

MOST = 2**31 - 1
"""Counts and lengths beyond it are slips of the hand."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
CacheBytes = Annotated[int, Field(ge=2**20, lt=2**63)]
"""Less than a megabyte is a slip of the unit: no model of use has room for a request in it."""
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(le=0)]


def _as_tuple(value: Any) -> Any:
    """YAML has lists only, and strict validation takes no list for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _refit_transport(value: Any) -> Any:
    """NeMo RL's other transports are no typing errors."""
    if value == "nccl":
        raise ValueError(
            "NeMo RL's transport 'nccl' is 'broadcast' here, by NCCL between GPUs and by gloo between CPUs; expected "
            "'broadcast' or 'auto'"
        )
    if value in ("nccl_reshard", "vllm_zmq_sparse", "vllm_s3_sparse", "nixl") or (
        isinstance(value, str) and ":" in value
    ):
        raise ValueError(
            f"NeMo RL's transport {value!r} is not available; whole weights go by one that is listed, or 'auto'"
        )
    return value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
"""Texts to look for; an empty one is in everything, so it is refused."""


class Section(BaseModel):
    """A block of a recipe: frozen, no unknown keys, no silent conversion of text to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),  # ``model_name`` is NeMo RL's key
        use_attribute_docstrings=True,
    )


KvCacheDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip
"""What supported versions of vLLM know as ``kv_cache_dtype``, all of them together."""
TOOL_PARSERS = ("hermes", "qwen3_coder", "nemotron_json", "llama3_json", "pythonic", "mistral", "openai")
"""Built-in tool parsers, by the names that vLLM uses where it has them."""
REASONING_PARSERS = ("think", "deepseek_r1", "openai")
"""Built-in reasoning parsers."""


class Grpo(Section):
    """The algorithm and the length of the run."""

    num_prompts_per_step: PositiveInt
    """Groups per training step."""
    num_generations_per_prompt: Annotated[int, Field(ge=2, le=MOST)]
    """Rollouts per group; a group of one has no baseline."""
    max_num_steps: PositiveInt
    """Training steps, warm-up not counted."""
    max_num_epochs: PositiveInt = 1
    """Passes over the training rows; the run ends at whichever limit comes first."""
    max_rollout_turns: PositiveInt = 8
    """Model calls per rollout; a rollout stopped by it is truncated."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of the group."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a rollout is the mean of the others in its group (RLOO), else the mean of the group."""
    overlong_filtering: bool = False
    """Truncated rollouts carry no loss; they still count in the baseline."""
    invalid_tool_call_advantage: Penalty | None = None
    """Replaces the advantage of a turn with a tool call that could not be run, such as -5.0; null leaves it."""
    malformed_thinking_advantage: Penalty | None = None
    """Replaces that of a turn with thinking in its answer or repeated tags; an invalid call in it comes first."""
    val_period: NonNegativeInt = 0
    """Validate every so many steps; 0 never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: PositiveInt | None = None
    """Validation rows per pass; null takes all."""
    seed: Seed = 42
    """Seeds data order, generated tasks, sampling and initialisation."""


class Rollouts(Section):
    """How rollouts are run and what a failed one may cost."""

    max_concurrency: PositiveInt = 64
    """Rollouts in flight."""
    deadline_s: PositiveFloat = 600.0
    """Wall time of one rollout attempt, seconds."""
    call_timeout_s: PositiveFloat = 300.0
    """Wall time of one model or environment call, seconds."""
    max_infra_attempts: PositiveInt = 3
    """Attempts per rollout; each retry starts a new session."""
    min_group_size: Annotated[int, Field(ge=2, le=MOST)] = 2
    """A group with fewer finished rollouts is short: see ``on_short_group``."""
    on_short_group: Literal["skip", "refill"] = "skip"
    """What a short group leads to: ``skip`` drops and counts it, ``refill`` takes the next prompt in its place."""
    max_failed_rollouts_per_step: NonNegativeInt | None = None
    """Rollouts of one step that may fail for good before the run ends with an error; null sets no limit."""
    max_skipped_steps: NonNegativeInt = 3
    """Steps in a row that may train nothing (every group dropped or empty) before the run ends with an error."""
    record_provenance: bool = False
    """Tell template from environment text in every recorded prompt; each model call is then rendered twice."""
    invalid_tool_call_patterns: Texts | None = None
    """Texts that, left in a message, are a call that was never run; null: <tool_call>, <function_call> and their ends;
    an empty list flags no turn, not even one with a call that the tool parser could not read."""
    thinking_tags: Texts | None = None
    """Tags that, left in a message, are thinking that leaked into it; null: <think> and </think>; [] flags no turn."""


class PenaltyTokens(Section):
    """Tokens that ``reward_penalties`` looks at, by id in the model's vocabulary."""

    unwanted: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_as_tuple)] | None = None
    """Tokens that no turn should sample, not even as its last one."""
    think_open: NonNegativeInt | None = None
    """The token that opens thinking; null, like ``think_close``, leaves the judgement to ``rollouts.thinking_tags``."""
    think_close: NonNegativeInt | None = None
    """The token that ends thinking."""


class RewardPenalties(Section):
    """Faults that take a finished rollout its whole reward: it is 0 then, whatever ``verify`` gave."""

    penalize_duplicated_reasoning: bool = False
    """The answer repeats the thinking before it, word for word."""
    penalize_empty_final_answer: bool = False
    """The last message is empty, or there is none."""
    penalize_unwanted_tokens: bool = False
    """A turn sampled one of ``token_ids.unwanted``."""
    penalize_malformed_think_tag: bool = False
    """Thinking is malformed (``rollouts.thinking_tags``), or its tokens are not those that the prompt asks for."""
    token_ids: PenaltyTokens | None = None
    """The tokens; null where no penalty needs one."""


class Loss(Section):
    """Clipped policy gradient (PPO, arXiv 1707.06347; group baseline as in GRPO, arXiv 2402.03300)."""

    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip: ratios below 1 - this are clipped."""
    ratio_clip_max: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip: ratios above 1 + this are clipped."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip for negative advantages (arXiv 1912.09729); null disables."""
    token_level_loss: bool = True
    """Mean over all trained tokens of the batch; false: mean per rollout, then over rollouts."""
    reference_policy_kl_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the initial policy; 0 keeps no reference model."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator (joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Log-ratios are clamped to plus or minus this before exp."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Per-token KL is clamped to plus or minus this."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by exp(trainer logprob - engine logprob), truncated."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper truncation of that weight; null leaves it untruncated."""


class SftWarmup(Section):
    """Supervised steps on demonstrations before the first GRPO step; loss on assistant tokens only."""

    steps: NonNegativeInt = 0
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: PositiveInt = 8
    """Demonstrations per step."""
    lr: PositiveFloat | None = None
    """Learning rate of the warm-up; null takes the optimizer's."""
    data_path: str | None = None
    """JSONL file of demonstrations ({"messages": [...], "tools": [...]}); null asks the environment's solver."""


class Tokenizer(Section):
    """How conversations become tokens."""

    name: str | None = None
    """Folder or Hugging Face id; null takes the model's."""
    chat_template: str | None = None
    """Jinja text, or a path ending in .jinja relative to the recipe; null takes the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables of the template."""
    tool_parser: str = "hermes"
    """How tool calls are read from text: a name from TOOL_PARSERS, or one that the plug-in defines."""
    tool_parser_plugin: str | None = None
    """Python file, relative to the recipe, that defines further tool parsers."""
    reasoning_parser: str | None = None
    """How reasoning is told from the answer: from REASONING_PARSERS or the plug-in; null leaves it in the text."""
    reasoning_parser_plugin: str | None = None
    """Python file, relative to the recipe, that defines further reasoning parsers."""


class OptimizerKwargs(Section):
    """Arguments of AdamW (arXiv 1711.05101)."""

    lr: Annotated[float, Field(ge=0)]
    """Learning rate after warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_as_tuple)] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class Optimizer(Section):
    """The optimizer."""

    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    """AdamW is the one supported."""
    kwargs: OptimizerKwargs
    """Its arguments."""


class Packing(Section):
    """Sequences of one group share their prefixes: packed as a tree, every shared token is computed once."""

    enabled: bool = True
    """False trains padded rows, one sequence each."""
    train_mb_tokens: PositiveInt = 1024
    """Packed tokens per microbatch; a longer sequence gets a microbatch of its own."""


class Resources(Section):
    """What the engines have to themselves where they are not colocated with the policy."""

    gpus_per_node: PositiveInt | None = None
    """GPUs of a node: on a cluster of one node some of them, on several nodes all."""
    num_nodes: PositiveInt | None = None
    """Nodes, on a cluster of several; the policy has the others."""


class Colocated(Section):
    """Whether engine and policy share devices."""

    enabled: bool = True
    """They take turns on the same GPUs; false gives the engines those of ``resources``. On a CPU always true."""
    resources: Resources = Resources()
    """The engines' own, where ``enabled`` is false."""


class TorchCfg(Section):
    """The embedded engine."""

    max_batch_size: PositiveInt = 64
    """Rows of the KV cache: requests decoded together."""


class ServingChatKwargs(Section):
    """NeMo RL's place for the parsers of the generation server."""

    tool_parser: str | None = None
    """NeMo RL's name of ``policy.tokenizer.tool_parser``; give one of the two."""
    reasoning_parser: str | None = None
    """NeMo RL's name of ``policy.tokenizer.reasoning_parser``; give one of the two."""
    enable_auto_tools: bool = True
    """Tool calls are always read; only true."""


class VllmCfg(Section):
    """vLLM, under NeMo RL's key names. The generation server is gymloop's own in front of either engine."""

    precision: Literal["auto", "float32", "bfloat16"] | None = None
    """NeMo RL's second place for the engine's type; null, or what ``policy.precision`` says."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share one model."""
    gpu_memory_utilization: Fraction = 0.6
    """Share of a GPU's memory for weights, KV cache and activations of the engine together."""
    kv_cache_memory_bytes: CacheBytes | None = None
    """KV cache of each GPU, or of the CPU; null plans it: every row full, or what there is beside the weights."""
    max_num_seqs: PositiveInt = 256
    """Requests decoded together."""
    max_model_len: PositiveInt | None = None
    """NeMo RL's second place for the context limit; null, or what ``policy.max_total_sequence_length`` says."""
    enforce_eager: bool | None = None
    """True captures no CUDA graphs; null is false on a GPU and true on a CPU, which has none in any case."""
    compile: bool = False
    """True lets torch.compile fuse the model's kernels: half a minute more at a first start, 5 s at later ones, and a
    tenth more tokens/s, as measured on a GPU. ``vllm_kwargs.compilation_config`` says all of it itself instead."""
    load_format: Literal["auto", "safetensors", "dummy"] | None = "auto"
    """``dummy`` reads no weights, and serves nothing before the first weight sync, which brings all that a checkpoint
    holds; what vLLM keeps beside that, such as a vision model's input norm, stays random. Null means ``auto``."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """As vLLM names it; ``auto`` is the engine's precision."""
    enable_prefix_caching: bool = True
    """Requests that begin alike share what is computed of it; dropped at every weight sync."""
    repeatable_draws: bool = False
    """True draws each rollout's tokens from a random stream of its own, so that the same recipe nearly repeats itself;
    vLLM may then draw row by row, and more slowly."""
    async_engine: bool = True
    """NeMo RL's switch; only true, since rollouts join and leave the batch at any step."""
    expose_http_server: bool = True
    """NeMo RL's switch; only true, since rollouts go through the generation server."""
    skip_tokenizer_init: bool | None = None
    """NeMo RL's switch; vLLM gets no tokenizer in any case, since gymloop renders and reads text itself."""
    tool_parser_plugin: str | None = None
    """NeMo RL's name of ``policy.tokenizer.tool_parser_plugin``; give one of the two."""
    reasoning_parser_plugin: str | None = None
    """NeMo RL's name of ``policy.tokenizer.reasoning_parser_plugin``; give one of the two."""
    http_server_serving_chat_kwargs: ServingChatKwargs = ServingChatKwargs()
    """The parsers, where NeMo RL has them."""


class Refit(Section):
    """How a weight sync is checked, and how long its parties wait for each other."""

    checksum: Literal["first", "always", "never"] = "first"
    """When every parameter that arrives is compared, by a checksum, with the policy's."""
    stall_timeout_s: PositiveFloat = 60.0
    """A broadcast in which nothing moves for this long is given up, seconds. A vLLM that does not answer an update for
    three times as long, at least three minutes, and a second for every 100 MB is taken for dead."""


class Generation(Section):
    """The engine and the training profile of sampling."""

    backend: Literal["torch", "vllm"] = "torch"
    """``torch`` is embedded; ``vllm`` needs vLLM installed (its extra ``vllm``)."""
    max_new_tokens: PositiveInt
    """Tokens per model call at most."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of training rollouts; the trainer's logprobs use the same."""
    top_p: Fraction = 1.0
    """Nucleus mass of training rollouts; below 1 the trainer's logprobs would be of another distribution."""
    top_k: PositiveInt | None = None
    """Likewise."""
    val_temperature: Annotated[float, Field(ge=0)] | None = None
    """Validation profile; null takes the training value."""
    val_top_p: Fraction | None = None
    """Likewise."""
    val_top_k: PositiveInt | None = None
    """Likewise."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_as_tuple)] | None = None
    """Null takes the end tokens of the model's generation config and tokenizer."""
    port_range_low: Annotated[int, Field(ge=1024, le=65535)] = 3000
    """First port the generation server may bind."""
    port_range_high: Annotated[int, Field(ge=1024, le=65535)] = 4999
    """Last port the generation server may bind."""
    colocated: Colocated = Colocated()
    """Whether engine and policy share devices."""
    replicas: PositiveInt | None = None
    """Engines beside each other, each with a URL of its own; null: GPUs / ``tensor_parallel_size``, on a CPU 1."""
    on_replica_death: Literal["continue", "stop"] = "stop"
    """Where one of several engine replicas dies or hangs: ``continue`` repeats its rollouts on the others until none is
    left, ``stop`` ends the run."""
    refit_transport: Annotated[
        Literal["auto", "shared_memory", "object_store", "cuda_ipc", "broadcast"] | None,
        BeforeValidator(_refit_transport),
    ] = "auto"
    """How weights reach the engines; auto, or null, chooses by where policy and engines are, see docs/weight-sync."""
    refit_cfg: Refit = Refit()
    """Checks and limits of a weight sync."""
    torch_cfg: TorchCfg = TorchCfg()
    """The embedded engine."""
    vllm_cfg: VllmCfg | None = None
    """vLLM, where ``backend`` is ``vllm``; null takes every default."""
    vllm_kwargs: dict[str, Any] = {}
    """Further arguments of vLLM's engine, as vLLM names them; those that would break a promise are refused."""


class Policy(Section):
    """The model being trained."""

    model_name: str
    """A folder or a Hugging Face id."""
    tokenizer: Tokenizer = Tokenizer()
    max_total_sequence_length: PositiveInt
    """Context limit of engine and trainer, tokens."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type over float32 masters; auto is bfloat16 where the device has it natively, else float32."""
    train_global_batch_size: PositiveInt | None = None
    """Rollouts per optimizer step; null makes one step of each rollout batch."""
    train_micro_batch_size: PositiveInt = 4
    """Sequences per microbatch where packing is off."""
    sequence_packing: Packing = Packing()
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm; null does not."""
    lr_warmup_steps: NonNegativeInt = 0
    """Linear warm-up of the learning rate, training steps."""
    refit_buffer_size_gb: PositiveFloat = 1.0
    """Buffers of a broadcast weight sync on each side, GiB; there are two, so a bucket is half of it."""
    call_timeout_s: PositiveFloat = 3600.0
    """Wall time of one call to a worker (an update, a weight sync, a save), seconds."""
    optimizer: Optimizer
    generation: Generation


class DataSource(Section):
    """Rows from a JSONL file or from an environment's generator; exactly one of the two."""

    data_path: str | None = None
    """JSONL file of NeMo Gym rows, relative to the recipe."""
    environment: str | None = None
    """Name of an environment under ``env.environments`` that generates tasks."""
    num_tasks: PositiveInt | None = None
    """Tasks to generate."""
    seed: Seed = 0
    """Seed of the generator."""


class Data(Section):
    """Training and validation rows."""

    train: DataSource
    validation: DataSource | None = None
    shuffle: bool = True
    """New order each epoch, from ``grpo.seed``."""


class EnvironmentSpec(Section):
    """One environment: a class in the run's own process or a server that runs already; exactly one of the two."""

    entrypoint: str | None = None
    """``module:Class``, a subclass of ``gymloop.gym.Environment``."""
    kwargs: dict[str, Any] = {}
    """Arguments of its constructor."""
    url: str | None = None
    """``http://host:port`` of a server; a run waits for it and watches it, and neither starts nor ends it."""
    agent: Literal["tool_calling", "gymnasium", "remote"] = "tool_calling"
    """Who plays the rollouts of a server: its sessions and tools, its ``/step``, or its own agent behind ``/run``."""


class NemoGym(Section):
    """NeMo Gym's servers, started by the run or running already; every further key overrides what its configs say."""

    model_config = ConfigDict(extra="allow")

    config_paths: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    """NeMo Gym's YAML files, beside the recipe or in the installed NeMo Gym; the run starts their servers."""
    head_server_url: str | None = None
    """``http://host:port`` of a NeMo Gym head server whose servers run already; in place of ``config_paths``."""
    is_trajectory_collection: bool = False
    """NeMo RL's switch to a run without training; only false, since ``gymloop collect`` does that."""
    port_range_low: Annotated[int, Field(ge=1024, le=65535)] = 10001
    """First port that a server may take."""
    port_range_high: Annotated[int, Field(ge=1024, le=65535)] = 20000
    """Last port that a server may take."""
    server_spinup_timeout_seconds: PositiveFloat = 300.0
    """A server that has not answered by then has failed, seconds."""
    invalid_tool_call_patterns: Texts | None = None
    """NeMo RL's name of ``rollouts.invalid_tool_call_patterns``; give one of the two."""
    thinking_tags: Texts | None = None
    """NeMo RL's name of ``rollouts.thinking_tags``; give one of the two."""

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class Env(Section):
    """The gym: at least one of ``environments`` and ``nemo_gym``."""

    environments: dict[str, EnvironmentSpec] = {}
    """Environments, each under the name that rows carry in ``agent_ref.name``."""
    nemo_gym: NemoGym | None = None
    """Servers of NeMo Gym; rows carry the names of its agents in ``agent_ref.name``."""
    should_use_nemo_gym: bool | None = None
    """NeMo RL's switch beside ``nemo_gym``: true, or nothing, since a block that is there is used."""
    nemo_gym_extra: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """The packages that ``gymloop gym install --extra`` was given, which tell one installation from another."""
    nemo_gym_installation: str | None = None
    """Folder of a virtual environment with NeMo Gym, relative to the recipe; null takes ``gymloop gym install``'s."""


class Checkpointing(Section):
    """When the run is saved."""

    enabled: bool = True
    """False saves nothing, not even when the run is interrupted."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step and an interruption save too."""
    keep_latest_k: PositiveInt = 2
    """Newest complete checkpoints kept."""
    metric_name: str | None = None
    """Metric by which checkpoints are ranked, as in metrics.jsonl, e.g. ``validation/reward/mean``; null ranks none."""
    higher_is_better: bool = True
    """Direction of ``metric_name``."""
    keep_top_k: PositiveInt | None = None
    """Best checkpoints by ``metric_name`` that are kept beside the newest."""
    checkpoint_must_save_by: str | None = None
    """``DD:HH:MM:SS`` after the start of the run: save and end before then, as for a job with a time limit."""
    accept_changed_data: bool = False
    """Resume although the training rows are not those of the checkpoint; the loader then begins a new epoch."""


class Logger(Section):
    """Where results go."""

    log_dir: str = "results"
    """Runs lie in ``<log_dir>/<recipe>/<run>``."""
    tensorboard_enabled: bool = True
    """Write metrics for TensorBoard too, beside ``metrics.jsonl``."""


class Startup(Section):
    """Deadlines of the startup graph, seconds; progress extends them."""

    deadline_s: PositiveFloat = 600.0
    """A task without progress for this long fails the run under its name."""


class Health(Section):
    """How a process that died or hangs is noticed while the run goes on, seconds, and what follows."""

    check_period_s: PositiveFloat = 2.0
    """Time between two looks at every worker and environment."""
    unresponsive_after_s: PositiveFloat = 60.0
    """A worker whose process lives but answers no heartbeat for this long is named and ends the run."""
    max_server_restarts: NonNegativeInt = 3
    """Times that one server of NeMo Gym's that the run started may die and be started again, over the run."""
    loop_lag_s: PositiveFloat = 5.0
    """An event loop that stands still for this long is reported with the stack of what blocks it."""


class Cluster(Section):
    """Machines."""

    gpus_per_node: NonNegativeInt = 0
    """0 trains on the CPU."""
    num_nodes: PositiveInt = 1
    """Nodes with that many GPUs each."""
    placement_timeout_s: PositiveFloat = 30.0
    """How long GPUs or CPUs that others hold are waited for, seconds; what the cluster does not have is refused."""
    worker_env: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Names of variables of the run's environment that workers get beside settings of CUDA, NCCL, vLLM and the like."""


class Recipe(Section):
    """A whole recipe."""

    grpo: Grpo
    rollouts: Rollouts = Rollouts()
    reward_penalties: RewardPenalties = RewardPenalties()
    loss_fn: Loss = Loss()
    sft_warmup: SftWarmup = SftWarmup()
    policy: Policy
    data: Data
    env: Env
    checkpointing: Checkpointing = Checkpointing()
    logger: Logger = Logger()
    startup: Startup = Startup()
    health: Health = Health()
    cluster: Cluster = Cluster()
    deterministic: bool = False
    """Same recipe, same numbers, bit for bit, also over a resume: fixed decode shapes and noise by position; slower."""

    _from_environment: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def from_environment(self) -> Mapping[tuple[str | int, ...], str]:
        """Keys whose value holds something of the environment, with the ``${...}`` that people and files see."""
        return self._from_environment

    def taken(self, from_environment: Mapping[tuple[str | int, ...], str]) -> Recipe:
        """This recipe, knowing which of its values it has from the environment."""
        recipe = self.model_copy()
        recipe._from_environment = dict(from_environment)
        return recipe
