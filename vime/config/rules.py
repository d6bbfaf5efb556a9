"""Rules between settings. Pure: no file, no model, no library is looked at."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator

from vime.config import engines
from vime.config.message import Finding
from vime.config.schema import Config

USER_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""``package.module:attribute``"""


SET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
RESERVED_SET_NAMES = ("eval", "dropped")
"""Names that the metrics of an evaluation have already."""
ID_FORM = re.compile(r"(0[1-9]\d?)?d?")
"""What may stand after the colon of ``{rollout_id:05d}``."""
RAY_ADDRESS = re.compile(r"(ray://)?[^\s/]+:\d{1,5}")
_MAX_NAME, _MAX_PATH = 255, 4095
_MAX_TRIED = 1_000_000  # a batch so large that this hides a divisor is no batch


def check(config: Config) -> tuple[list[Finding], list[Finding]]:
    """(problems, warnings) of a configuration whose single values are valid."""
    rules = [_paths, _cluster, _mode, _batch, _sampling, _lengths]
    rules += [_reward, _evaluation, _schedule, _parallel, _functions, engines.problems]
    problems = [finding for rule in rules for finding in rule(config)]
    for path in ("debug.save_rollout_data", "debug.load_rollout_data"):
        problems += _template(config, path)
    return problems, [*_doubtful(config), *engines.doubtful(config)]


def nearest_divisors(n: int, wanted: int, count: int = 4) -> list[int]:
    """The divisors of ``n`` nearest to ``wanted``, ascending."""
    small = [d for d in range(1, min(math.isqrt(n), _MAX_TRIED) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:count])


def batch_arithmetic(config: Config) -> str:
    """The one line that says how samples become optimizer steps."""
    c = config
    return (
        f"{c.rollout.rollout_batch_size} prompts x {c.rollout.num_samples_per_prompt} samples = "
        f"{c.num_samples_per_rollout} samples per rollout = {c.train.num_steps_per_rollout} steps x "
        f"global batch {c.global_batch_size}; {c.run.num_rollouts} rollouts = {c.num_steps} optimizer steps"
    )


def template_problem(template: str) -> str | None:
    """What is wrong with a record template; None where it names files by the digits of the rollout id.

    Those names alone differ from rollout to rollout (``{rollout_id:.0e}`` has one for 10 to 14) and can be listed.
    """
    try:
        fields = [field[1:] for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        return str(error)
    for name, form, conversion in fields:
        if name != "rollout_id":
            return f"unknown field {{{name}}}; a brace that belongs to the name is written twice"
        if conversion or not ID_FORM.fullmatch(form or ""):
            return "digits alone name a rollout, such as {rollout_id} or {rollout_id:05d}"
    return None


def _paths(c: Config) -> Iterator[Finding]:
    """No empty path (it would mean the current folder), and none with a NUL, which no system can open."""
    named = [("model.path", c.model.path), ("model.ref_path", c.model.ref_path), ("run.dir", c.run_dir)]
    named += [("data.prompts", path) for path in c.data.prompts] + [("eval.prompts", path) for path in c.eval.prompts]
    named += [(f"eval.sets.{name}.prompts", path) for name, own in c.eval.sets.items() for path in own.prompts]
    named += [("debug.save_rollout_data", c.debug.save_rollout_data)]
    named += [("debug.load_rollout_data", c.debug.load_rollout_data)]
    for setting, path in named:
        if path == "":
            yield Finding(setting, "must not be empty")
        elif path is not None and "\0" in path:
            yield Finding(setting, "must not hold a NUL character")
        elif path is not None and _is_too_long(path):
            text = f"is too long for a path: {_MAX_NAME} bytes a name and {_MAX_PATH} in all"
            yield Finding(setting, text)
    if c.run.name in ("", ".", ".."):
        yield Finding("run.name", "must be a name for a folder")


def _is_too_long(path: str) -> bool:
    parts = path.encode("utf-8", "surrogatepass").split(b"/")
    return max(map(len, parts)) > _MAX_NAME or sum(map(len, parts)) + len(parts) > _MAX_PATH


def _cluster(c: Config) -> Iterator[Finding]:
    address = c.cluster.ray_address
    if address is not None and not RAY_ADDRESS.fullmatch(address):
        text = "must be HOST:PORT or ray://HOST:PORT; nothing is discovered or guessed (unset: a cluster of its own)"
        yield Finding("cluster.ray_address", text)


def _mode(c: Config) -> Iterator[Finding]:
    debug = c.debug
    if debug.rollout_only and debug.load_rollout_data:
        text = "contradicts debug.load_rollout_data: a recorded rollout is not generated again"
        yield Finding("debug.rollout_only", text, ("debug.load_rollout_data",))
    elif debug.rollout_only and debug.train_only:
        yield Finding("debug.rollout_only", "contradicts debug.train_only: nothing would be left to do")
    if debug.load_rollout_data and not debug.train_only:
        text = "must be true with debug.load_rollout_data: engines are not started for recorded rollouts"
        yield Finding("debug.train_only", text, ("debug.load_rollout_data",))
    if debug.train_only and not debug.load_rollout_data:
        text = (
            "needs debug.load_rollout_data (vime replay: --load TEMPLATE): without engines there is nothing to train on"
        )
        yield Finding("debug.train_only", text, ("debug.load_rollout_data",))
    if c.run.num_rollouts == 0:
        yield from _no_rollouts(c)


def _no_rollouts(c: Config) -> Iterator[Finding]:
    reads = ("eval.prompts", "eval.sets", "debug.rollout_only", "debug.train_only")
    otherwise = "to generate" if c.debug.rollout_only else "to train"
    if c.debug.train_only:
        yield Finding("run.num_rollouts", "must be >= 1 with debug.train_only: recorded rollouts are trained on", reads)
    elif not c.evaluation_sets:
        text = (
            "evaluates once and exits, but there is no evaluation set; set eval.prompts or [eval.sets.NAME], "
            f"or num_rollouts >= 1 {otherwise}"
        )
        yield Finding("run.num_rollouts", text, reads)


_BATCH = (
    "rollout.rollout_batch_size",
    "rollout.num_samples_per_prompt",
    "train.global_batch_size",
    "train.num_steps_per_rollout",
)


def _batch(c: Config) -> Iterator[Finding]:
    """rollout_batch_size x num_samples_per_prompt = global_batch_size x num_steps_per_rollout.

    A recorded rollout brings its own number of samples, so there the run compares with the record.
    """
    if not c.needs_trainer:
        return
    is_recorded = c.debug.load_rollout_data is not None
    trained = c.global_batch_size * c.train.num_steps_per_rollout
    if not is_recorded and c.num_samples_per_rollout != trained:
        yield _unequal_steps(c) if c.train.global_batch_size is None else _unequal_batch(c)
    elif c.global_batch_size < c.parallel.dp and not (is_recorded and c.train.global_batch_size is None):
        text = (
            f"must be <= samples per optimizer step ({c.global_batch_size}): each data-parallel rank needs a sample "
            f"in every step; valid: parallel.dp <= {c.global_batch_size}"
        )
        yield Finding("parallel.dp", text, _BATCH)


def _unequal_steps(c: Config) -> Finding:
    samples = c.num_samples_per_rollout
    valid = nearest_divisors(samples, c.train.num_steps_per_rollout)
    text = (
        f"must divide rollout_batch_size x num_samples_per_prompt = {c.rollout.rollout_batch_size} x "
        f"{c.rollout.num_samples_per_prompt} = {samples} samples per rollout; "
        f"nearest valid num_steps_per_rollout: {_join(valid)}"
    )
    return Finding("train.num_steps_per_rollout", text, _BATCH)


def _unequal_batch(c: Config) -> Finding:
    batch, group, steps = c.rollout.rollout_batch_size, c.rollout.num_samples_per_prompt, c.train.num_steps_per_rollout
    samples, wanted = c.num_samples_per_rollout, c.global_batch_size
    valid = [samples // d for d in nearest_divisors(samples, max(1, samples // wanted))]
    text = (
        f"rollout_batch_size x num_samples_per_prompt must equal global_batch_size x num_steps_per_rollout, but "
        f"{batch} x {group} = {samples} and {wanted} x {steps} = {wanted * steps} "
        f"(the whole run of {c.run.num_rollouts} rollouts has {c.run.num_rollouts * samples} samples); "
        f"nearest valid global_batch_size: {_batches(samples, valid)}{_or_prompts(c)}"
    )
    return Finding("train.global_batch_size", text, _BATCH)


def _batches(samples: int, valid: list[int]) -> str:
    return _join([f"{v} (num_steps_per_rollout {samples // v})" for v in sorted(valid)])


def _or_prompts(c: Config) -> str:
    """The other way out: a number of prompts that fills the batch that was asked for."""
    trained, group = c.global_batch_size * c.train.num_steps_per_rollout, c.rollout.num_samples_per_prompt
    return f"; or rollout_batch_size = {trained // group}" if trained % group == 0 else ""


def _sampling(c: Config) -> Iterator[Finding]:
    s = c.rollout.sampling
    if s.temperature < 0:
        yield Finding("rollout.sampling.temperature", "must be >= 0 (0 is greedy, > 0 for training)")
    if s.top_k < 0:
        yield Finding("rollout.sampling.top_k", "must be >= 0; 0 means all tokens")
    if s.min_response_len > s.max_response_len:
        text = f"must be <= rollout.sampling.max_response_len = {s.max_response_len}"
        yield Finding("rollout.sampling.min_response_len", text, ("rollout.sampling.max_response_len",))
    if not c.needs_trainer:
        return
    reads = ("debug.rollout_only",)
    if s.temperature == 0:
        text = "must be > 0 for training (log-probs are divided by it); greedy is allowed with debug.rollout_only"
        yield Finding("rollout.sampling.temperature", text, reads)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_response_len": 0}
    for name, value in neutral.items():
        if getattr(s, name) != value and not (name == "top_k" and s.top_k < 0):
            text = (
                f"must be {value:g} for training: log-probs would belong to another distribution than the trainer's; "
                "allowed with debug.rollout_only"
            )
            yield Finding(f"rollout.sampling.{name}", text, reads)


def _lengths(c: Config) -> Iterator[Finding]:
    context, prompt = c.rollout.max_context_len, c.data.max_prompt_len
    if context is not None and prompt is not None and context <= prompt:
        text = f"must be > data.max_prompt_len = {prompt}, to leave room for a response"
        yield Finding("rollout.max_context_len", text, ("data.max_prompt_len",))


def _reward(c: Config) -> Iterator[Finding]:
    r = c.reward
    if c.debug.load_rollout_data:
        return  # rewards are in the record
    if r.name == "user" and r.function is None:
        yield Finding("reward.name", "needs reward.function = 'package.module:attribute'", ("reward.function",))
    if r.name == "format" and r.pattern is None:
        yield Finding("reward.name", "needs reward.pattern, a regular expression", ("reward.pattern",))
    if r.name in ("exact", "math") and c.data.label_key is None:
        yield Finding("reward.name", "compares with a label: set data.label_key", ("data.label_key",))
    if r.score_on_timeout is not None and not math.isfinite(r.score_on_timeout):
        yield Finding("reward.score_on_timeout", 'must be finite, or "none" to drop the sample')
    if r.pattern is not None:
        yield from _pattern(c)


def _pattern(c: Config) -> Iterator[Finding]:
    try:
        groups = re.compile(c.reward.pattern or "").groups
    except re.error as error:
        yield Finding("reward.pattern", f"is no regular expression: {error}")
        return
    if c.reward.name == "exact" and groups == 0:
        yield Finding(
            "reward.pattern", "needs a group: exact compares its first group with the label", ("reward.name",)
        )


def _evaluation(c: Config) -> Iterator[Finding]:
    if c.eval.interval > 0 and not c.evaluation_sets:
        yield Finding("eval.interval", "needs eval.prompts or [eval.sets.NAME]", ("eval.prompts", "eval.sets"))
    for name, own in c.eval.sets.items():
        if not SET_NAME.fullmatch(name) or name in RESERVED_SET_NAMES:
            text = (
                "the name of an evaluation set is a letter or _, then letters, digits and _, at most 64 of them "
                f"(files and metrics are named after it), and none of {_join(list(RESERVED_SET_NAMES))}"
            )
            yield Finding(f"eval.sets.{name}", text)
        if own.top_k is not None and own.top_k < 0:
            yield Finding(f"eval.sets.{name}.top_k", "must be >= 0; 0 means all tokens")


def _schedule(c: Config) -> Iterator[Finding]:
    if not c.needs_trainer:
        return
    t = c.train
    if t.num_warmup_steps > c.num_steps:
        text = (
            f"must be <= the optimizer steps of the run, num_rollouts x num_steps_per_rollout = "
            f"{c.run.num_rollouts} x {t.num_steps_per_rollout} = {c.num_steps}"
        )
        yield Finding("train.num_warmup_steps", text, ("run.num_rollouts", "train.num_steps_per_rollout"))
    if t.min_lr > t.lr:
        yield Finding("train.min_lr", f"must be <= train.lr = {t.lr:g}", ("train.lr",))


def _parallel(c: Config) -> Iterator[Finding]:
    p = c.parallel
    if p.vpp is not None and p.pp == 1:
        yield Finding("parallel.vpp", "needs parallel.pp >= 2: virtual stages interleave real ones", ("parallel.pp",))
    elif p.vpp == 1:
        yield Finding("parallel.vpp", 'must be >= 2; leave it out (or "none") for the plain schedule')
    for name in ("num_layers_in_first_stage", "num_layers_in_last_stage"):
        if getattr(p, name) is not None and p.pp == 1:
            yield Finding(f"parallel.{name}", "needs parallel.pp >= 2: one stage holds all layers", ("parallel.pp",))
    if p.sequence_parallel and p.tp == 1:
        yield Finding("parallel.sequence_parallel", "needs parallel.tp >= 2", ("parallel.tp",))
    num_ranks, etp = p.world_size // p.pp, p.expert_tp
    if num_ranks % (p.ep * etp):
        setting = "parallel.etp" if p.etp is not None and num_ranks % p.ep == 0 else "parallel.ep"
        text = (
            f"ep x etp = {p.ep} x {etp} must divide tp x cp x dp = {num_ranks}: experts are spread over the ranks of a "
            "pipeline stage"
        )
        yield Finding(setting, text, ("parallel.etp", "parallel.tp", "parallel.cp", "parallel.dp"))


def _functions(c: Config) -> Iterator[Finding]:
    for path, value in (("reward.function", c.reward.function), ("rollout.generate", c.rollout.generate)):
        if value is not None and not USER_FUNCTION.fullmatch(value):
            yield Finding(path, "must read 'package.module:attribute'")


def _template(c: Config, path: str) -> Iterator[Finding]:
    """One file per rollout: a template without {rollout_id} would write, or read, one file for all of them."""
    template = getattr(c.debug, path.rpartition(".")[2])
    if template is None:
        return
    if problem := template_problem(template):
        yield Finding(path, f"is no valid template ({problem}); the only field is {{rollout_id}}")
        return
    if template.format(rollout_id=0) == template.format(rollout_id=1) and c.run.num_rollouts > 1:
        verb = "written over" if path.endswith("save_rollout_data") else "read"
        text = (
            f"needs {{rollout_id}}: without it the one file would be {verb} {c.run.num_rollouts} times; "
            f"for example {_with_field(template)}, or run.num_rollouts=1 for this one file"
        )
        yield Finding(path, text, ("run.num_rollouts",))
    if path.endswith("save_rollout_data") and c.debug.load_rollout_data is not None:
        text = "contradicts debug.load_rollout_data: recorded rollouts are not recorded again"
        yield Finding(path, text, ("debug.load_rollout_data",))


def _with_field(template: str) -> str:
    stem, dot, suffix = template.rpartition(".")
    return f"{stem}_{{rollout_id}}.{suffix}" if dot and "/" not in suffix else f"{template}_{{rollout_id}}"


def _doubtful(c: Config) -> Iterator[Finding]:
    """Settings that are valid but ignored, or hardly what was meant."""
    if c.rollout.num_samples_per_prompt == 1 and c.needs_trainer and not c.debug.load_rollout_data:
        text = "a group of one has no spread: under a group baseline every advantage is 0 and nothing is learned"
        yield Finding("rollout.num_samples_per_prompt", text, ("algo.name",))
    if c.reward.function is not None and c.reward.name != "user":
        yield Finding("reward.function", f'is ignored: reward.name is "{c.reward.name}", not "user"')
    if c.reward.per_group and c.reward.name != "user":
        yield Finding("reward.per_group", f'is ignored: reward.name is "{c.reward.name}", not "user"')
    if c.reward.pattern is not None and c.reward.name in ("math", "user"):
        yield Finding("reward.pattern", f'is ignored by reward.name = "{c.reward.name}"')
    if c.model.ref_path is not None and not c.uses_reference:
        yield Finding("model.ref_path", "is ignored: algo.log_ref is false and algo.kl_coef is 0")
    if c.algo.kl_coef > 0 and c.algo.kl_estimator == "k1" and c.needs_trainer:
        text = "has a gradient of mean 0 as a loss: it does not hold the policy to the reference; k2 and k3 do"
        yield Finding("algo.kl_estimator", text, ("algo.kl_coef",))
    yield from _doubtful_evaluation(c)
    if c.train.min_lr > 0 and c.train.lr_schedule == "constant":
        yield Finding("train.min_lr", 'is ignored: train.lr_schedule is "constant"', ("train.lr_schedule",))
    if c.checkpoint.keep is not None and c.checkpoint.save_interval == 0:
        yield Finding("checkpoint.keep", "is ignored: checkpoint.save_interval is 0", ("checkpoint.save_interval",))
    if c.cluster.colocate and not (c.needs_engines and c.needs_trainer):
        yield Finding("cluster.colocate", "is ignored: only one side, trainer or engines, is started")


def _doubtful_evaluation(c: Config) -> Iterator[Finding]:
    for name, found in c.evaluation_sets.items():
        own = c.eval.sets.get(name)
        table = "eval" if own is None else f"eval.sets.{name}"
        if not c.needs_engines:
            yield Finding(f"{table}.prompts", "is ignored: no engine is started for recorded rollouts")
        if found.temperature == 0 and (found.num_samples_per_prompt or 1) > 1:
            is_own = own is None or own.num_samples_per_prompt is not None
            where = "eval.temperature" if own is None else f"the temperature of evaluation set {name}"
            text = f"greedy samples of one prompt are all alike ({where} is 0)"
            setting = f"{table if is_own else 'eval'}.num_samples_per_prompt"
            yield Finding(setting, text, (f"{table}.temperature", "eval.temperature"))
    if c.run.num_rollouts == 0 and c.debug.save_rollout_data is not None:
        yield Finding("debug.save_rollout_data", "is ignored: there is no rollout (run.num_rollouts is 0)")


def _join(values: list[int] | list[str]) -> str:
    return ", ".join(str(v) for v in values)
