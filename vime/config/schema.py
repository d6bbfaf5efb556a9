"""The typed, frozen tree of settings. A docstring under each field says what it means and its neutral value.

What a library already names keeps the library's name (``[megatron.*]``, ``[vllm]``) and is checked against the
library's own dataclass in ``native.py``. Facts stated once here are derived into both backends.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**31 - 1
"""Counts are 32-bit in the libraries that they are handed to."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Run(Section):
    dir: str = "runs/{name}"
    """Run folder: metrics, resolved configuration, checkpoints. ``{name}`` is replaced. By default ``vime rollout`` and
    ``vime replay`` take ``runs/{name}-rollout`` and ``runs/{name}-replay``, numbered where there is one."""
    name: str = "run"
    """Name of the run; the default of ``run.dir`` uses it."""
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """Every seed (prompt order, each sample, initial RNG) derives from this one."""
    num_rollouts: NonNegative = 1
    """Number of rollouts in the whole run. 0 evaluates once and exits."""
    overwrite: bool = False
    """Allow a run folder that already holds a run to be replaced."""


class Model(Section):
    path: str
    """Hugging Face folder of the policy: config.json, tokenizer, *.safetensors."""
    ref_path: str | None = None
    """Folder of the reference model; None: the policy's own starting weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and computation, in trainer and engine alike."""


class Data(Section):
    prompts: list[str] = Field(min_length=1)
    """JSONL or parquet files; a suffix ``@[a:b]`` takes a slice of the rows."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of {role, content}. Dotted names reach into objects."""
    label_key: str | None = "label"
    """Column of the expected answer, handed to the reward; None: there is none."""
    metadata_key: str | None = None
    """Column of a free object, handed to the reward."""
    apply_chat_template: bool = True
    """Render messages (a string becomes one user message) with the chat template. False: encode the string as it is."""
    shuffle: bool = True
    """A new order each epoch, derived from ``run.seed``."""
    max_prompt_len: Positive | None = None
    """Longest prompt in tokens; None: whatever leaves room for one response token in the context."""
    on_too_long: Literal["drop", "error"] = "drop"
    """Prompts over the limit are dropped, counted and named, or refused at the start."""


class Sampling(Section):
    """Sampling options of the rollout, each one sent to the engine explicitly, whatever generation_config.json says."""

    temperature: float = 1.0
    """Divides the logits, in engine and trainer alike. Must be > 0 for training."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Neutral 1.0; anything else is refused for training (log-probs would belong to a truncated distribution)."""
    top_k: int = 0
    """Neutral 0 (all tokens); see top_p."""
    min_p: Fraction = 0.0
    """Neutral 0.0; see top_p."""
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    """Neutral 1.0; see top_p."""
    presence_penalty: float = 0.0
    """Neutral 0.0; see top_p."""
    frequency_penalty: float = 0.0
    """Neutral 0.0; see top_p."""
    max_response_len: Positive = 256
    """Longest response in tokens; longer ones end with status truncated."""
    min_response_len: NonNegative = 0
    """Stop ids are not sampled before this length. Neutral 0; see top_p."""
    stop_token_ids: list[NonNegative] = []
    """Stop ids beside those of model and tokenizer (the union is used and printed)."""
    ignore_stop: bool = False
    """Go on after stop ids, to the length limit (for benchmarks)."""


class Rollout(Section):
    rollout_batch_size: Positive = 8
    """Prompts per rollout."""
    num_samples_per_prompt: Positive = 8
    """Samples per prompt: the size of a group."""
    sampling: Sampling = Sampling()
    """Sampling options of the rollout."""
    num_engines: Positive = 1
    """Engines side by side; requests go to the one with the fewest tokens outstanding."""
    engine_tp: Positive = 1
    """Tensor-parallel size of each engine."""
    generate: str | None = None
    """User function ``package.module:attribute`` that replaces the single-turn generation."""
    max_context_len: Positive | None = None
    """Longest prompt + response; None: prompt limit + max_response_len, at most the model's context."""
    group_filter: Literal["none", "nonzero_spread"] = "none"
    """Keep every complete group, or only those whose rewards differ (others are replaced by new prompts)."""
    max_filter_rounds: Positive = 8
    """How many times a rollout may be refilled before it stops with the share kept per round."""
    timeout_seconds: Seconds = 1800.0
    """Longest wait for one rollout; on expiry the pending requests are named."""
    engines: list[str] = []
    """URLs of running vLLM servers (OpenAI-compatible, ``http://host:port``) to use instead of engines of our own; only
    with ``debug.rollout_only``, since no weights are sent to them. VIME_API_KEY of the environment is their API key."""
    serve_openai: bool = False
    """Serve each engine's OpenAI-compatible endpoint on loopback while the run lasts."""


class Reward(Section):
    name: Literal["exact", "math", "format", "user"] = "exact"
    """exact: answer equals the label; math: math-verify; format: ``pattern`` matches; user: ``function``."""
    function: str | None = None
    """User reward ``package.module:attribute``, sync or async; called with one sample (``text``, ``label``,
    ``metadata``, ...), or with a group where ``per_group``. It returns a number, or {"reward": number, ...}."""
    per_group: bool = False
    """The user function takes a list of samples and returns a list of scores."""
    pattern: str | None = None
    """Regular expression: ``format`` rewards a full match; ``exact`` compares its first group with the label."""
    num_workers: Positive = 1
    """Worker processes that run the reward."""
    timeout_seconds: Seconds = 10.0
    """Wall-clock limit of one call; the worker is killed on expiry."""
    score_on_timeout: float | None = 0.0
    """Score of a sample whose reward ran out of time (counted); None: the sample is dropped."""


class Algo(Section):
    name: str = "grpo"
    """Advantage estimator, see ``vime/algo``."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation. False is one half of Dr. GRPO."""
    loss_normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all tokens; mean over sequences of token means; or (Dr. GRPO) sum / (sequences x max_response_len)."""
    eps_clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """PPO ratio is clipped at 1 - eps_clip_low."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """PPO ratio is clipped at 1 + eps_clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c of the dual clip for negative advantages (loss <= -c * advantage); None: off."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of KL(policy || reference) in the loss. Neutral 0.0."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "k3"
    """Estimator of the KL term; low_var is k3 clipped to [-10, 10]."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy bonus. Neutral 0.0."""
    log_ref: bool = True
    """Keep a reference model and report ref_log_probs even where kl_coef is 0."""


class Train(Section):
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Peak learning rate of Adam."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over all optimizer steps of the run."""
    num_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the end of linear or cosine decay."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay. Neutral 0.0."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of Adam's first moment, per optimizer step."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of Adam's second moment, per optimizer step."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: Annotated[float, Field(gt=0.0)] = 1.0
    """Global gradient norm is clipped to this; inf measures without clipping."""
    num_steps_per_rollout: Positive = 1
    """Optimizer steps per rollout. 1 is on-policy: ratio 1, kl 0."""
    global_batch_size: Positive | None = None
    """Samples per optimizer step; None: rollout_batch_size x num_samples_per_prompt / num_steps_per_rollout."""
    max_tokens_per_micro_batch: Positive = 4096
    """Packed micro-batches hold at most this many tokens (a longer sample travels alone)."""
    nan_policy: Literal["stop", "skip"] = "stop"
    """A non-finite loss or gradient stops the run, or skips the step and counts it; names are printed either way."""
    step_timeout_seconds: Seconds = 1800.0
    """Longest wait for one call of the trainer."""


class Parallel(Section):
    tp: Positive = 1
    """Tensor-parallel size."""
    pp: Positive = 1
    """Pipeline stages."""
    vpp: Positive | None = None
    """Virtual stages per pipeline rank (interleaved schedule); None: off."""
    cp: Positive = 1
    """Context-parallel size."""
    dp: Positive = 1
    """Data-parallel size. Trainer processes = tp x pp x cp x dp."""
    sequence_parallel: bool = False
    """Split activations of norms along the sequence over the tp ranks."""
    num_layers_in_first_stage: Positive | None = None
    """Layers of the first pipeline stage; None: even."""
    num_layers_in_last_stage: Positive | None = None
    """Layers of the last pipeline stage; None: even."""
    distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""
    ep: Positive = 1
    """Expert-parallel size: experts are spread over so many ranks of a stage; ep x etp divides tp x cp x dp."""
    etp: Positive | None = None
    """Tensor-parallel size inside each expert; None: 1 where ep > 1, else tp."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size inside each expert."""
        return self.etp or (1 if self.ep > 1 else self.tp)


class Weights(Section):
    transport: Literal["shm"] = "shm"
    """How weights travel from trainer to engines; see ``vime/weights``."""
    verify: Literal["full", "sampled", "received", "off"] = "sampled"
    """What is digested at a sync: full, every tensor as the engine received it and as it holds it; sampled, so at the
    first sync, later a tenth of the tensors each time, all of them in turn; received, never what it holds; off, none.
    What a sync spends on this is reported."""
    timeout_seconds: Seconds = 300.0
    """Longest wait for one weight sync."""


class Checkpoint(Section):
    save_interval: NonNegative = 0
    """Save after every so many rollouts; 0: never. The last rollout is always saved when > 0."""
    keep: Positive | None = None
    """Keep the newest so many checkpoints; None: all."""
    export_hf: bool = False
    """Write a Hugging Face folder of the final weights to ``<run dir>/hf``."""


class EvalSet(Section):
    """One named evaluation set. What is not given is as in ``[eval]``."""

    prompts: list[str] = Field(min_length=1)
    """Prompt files, same columns as ``data``."""
    num_samples_per_prompt: Positive | None = None
    """See ``eval.num_samples_per_prompt``."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """See ``eval.temperature``."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """None: as ``rollout.sampling.top_p``."""
    top_k: int | None = None
    """None: as ``rollout.sampling.top_k``."""
    max_response_len: Positive | None = None
    """None: as ``rollout.sampling.max_response_len``."""
    max_prompts: Positive | None = None
    """See ``eval.max_prompts``."""


class Eval(Section):
    prompts: list[str] = []
    """Prompt files for evaluation, same columns as ``data``; empty: no evaluation."""
    interval: NonNegative = 0
    """Evaluate after every so many rollouts, and after the last; 0: only before the first."""
    num_samples_per_prompt: Positive = 1
    """Samples per evaluation prompt; the score is their mean."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0.0 is greedy."""
    max_prompts: Positive | None = None
    """Only the first so many prompts."""
    pass_reward: float = 1.0
    """A sample passes with at least this reward: what pass@k counts."""
    sets: dict[str, EvalSet] = {}
    """Further evaluation sets by name (``[eval.sets.NAME]``), beside ``eval.prompts``, which is the set "eval"."""


class Cluster(Section):
    ray_address: str | None = None
    """Existing Ray cluster (host:port or ray://...); None: a private one on loopback, ended with the run."""
    colocate: bool = False
    """Trainer and engines share devices: each frees its memory while the other works."""
    start_timeout_seconds: Seconds = 300.0
    """Longest wait for all processes to be ready."""
    threads_per_trainer: Positive = 1
    """CPU threads of each trainer rank."""


class Debug(Section):
    rollout_only: bool = False
    """Generate only; Megatron is never loaded (--debug-rollout-only)."""
    train_only: bool = False
    """Train on recorded rollouts only; vLLM is never loaded (--debug-train-only)."""
    save_rollout_data: str | None = None
    """Template of the record files, e.g. data_{rollout_id}.pt (--save-debug-rollout-data)."""
    load_rollout_data: str | None = None
    """Train on these records instead of generating; sets train_only (--load-debug-rollout-data)."""
    oracle_samples: NonNegative = 8
    """Samples whose tokens ``vime rollout`` scores again with the checkpoint's own Hugging Face model; 0: none."""
    inject: list[str] = []
    """Faults to plant, so that one sees the checks catch them; ``vime.align.faults`` lists them. Neutral: none."""


class Log(Section):
    tensorboard: bool = False
    """Also write TensorBoard events to <run dir>/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    show_samples: NonNegative = 1
    """Samples printed per rollout."""


class Megatron(Section):
    """Settings under Megatron-core's own names, passed through to its dataclasses."""

    transformer: dict[str, Any] = {}
    """Fields of Megatron-core's TransformerConfig."""
    optimizer: dict[str, Any] = {}
    """Fields of Megatron-core's OptimizerConfig."""
    ddp: dict[str, Any] = {}
    """Fields of Megatron-core's DistributedDataParallelConfig."""


class Config(Section):
    """Everything a run is. Loaded by ``vime.config.load`` and never written to afterwards."""

    run: Run = Run()
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algo: Algo = Algo()
    train: Train = Train()
    parallel: Parallel = Parallel()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    cluster: Cluster = Cluster()
    debug: Debug = Debug()
    log: Log = Log()
    megatron: Megatron = Megatron()
    vllm: dict[str, Any] = {}
    """Engine arguments under vLLM's own names (AsyncEngineArgs)."""

    @property
    def num_samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.num_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        return self.train.global_batch_size or self.num_samples_per_rollout // self.train.num_steps_per_rollout

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.num_rollouts * self.train.num_steps_per_rollout

    @property
    def evaluation_sets(self) -> dict[str, EvalSet]:
        """Every evaluation set by name (that of ``eval.prompts`` is "eval"), with what it inherits filled in."""
        plain = {"eval": EvalSet(prompts=self.eval.prompts)} if self.eval.prompts else {}
        inherited = {
            name: getattr(self.eval, name) for name in ("num_samples_per_prompt", "temperature", "max_prompts")
        }
        inherited |= {name: getattr(self.rollout.sampling, name) for name in ("top_p", "top_k", "max_response_len")}
        return {
            name: own.model_copy(update={k: v for k, v in inherited.items() if getattr(own, k) is None})
            for name, own in (plain | self.eval.sets).items()
        }

    @property
    def longest_response(self) -> int:
        """The largest limit of a response, in tokens, of rollouts and evaluation sets."""
        limits = [found.max_response_len or 0 for found in self.evaluation_sets.values()]
        return max(self.rollout.sampling.max_response_len, *limits, 0)

    @property
    def run_dir(self) -> str:
        return self.run.dir.replace("{name}", self.run.name)

    @property
    def uses_reference(self) -> bool:
        return self.algo.log_ref or self.algo.kl_coef > 0.0

    @property
    def needs_engines(self) -> bool:
        return not (self.debug.train_only or self.debug.load_rollout_data)

    @property
    def needs_trainer(self) -> bool:
        return not self.debug.rollout_only and self.run.num_rollouts > 0
