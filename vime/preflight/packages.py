"""Are the libraries of a command installed? Found, never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from vime.config.schema import Config
from vime.errors import UsageError

ENGINE = ("torch", "vllm", "ray", "transformers", "safetensors", "numpy", "blake3")
EXTERNAL = ("torch", "httpx", "transformers", "numpy")
"""What it takes to ask engines that somebody else runs."""
TRAINER = ("torch", "megatron.core", "ray", "transformers", "safetensors", "numpy", "blake3")


def missing(config: Config) -> dict[str, str]:
    """Import name -> extra of vime that brings it, for every library this configuration needs and that is absent."""
    engine = EXTERNAL if config.rollout.engines else ENGINE
    needed = dict.fromkeys(engine if config.needs_engines else (), "cpu")
    needed |= dict.fromkeys(TRAINER if config.needs_trainer else (), "cpu")
    if config.needs_engines and config.reward.name == "math":
        needed["math_verify"] = "cpu"
    evaluation = [path for found in config.evaluation_sets.values() for path in found.prompts]
    if any(".parquet" in path for path in (*config.data.prompts, *evaluation)):
        needed["pyarrow"] = "cpu"
    if config.log.tensorboard:
        needed["tensorboard"] = "cpu"
    if config.log.wandb_project is not None:
        needed["wandb"] = "wandb"
    return {name: extra for name, extra in needed.items() if not is_installed(name)}


def require(what: str, *names: str) -> None:
    """UsageError where one of these libraries is absent."""
    if absent := {name: "cpu" for name in names if not is_installed(name)}:
        raise UsageError(f"{what} needs {', '.join(absent)}", install_line(absent))


def is_installed(name: str) -> bool:
    """Whether ``name`` can be imported. Of ``megatron.core`` the folder is sought: find_spec would import the top."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    return any(Path(location, *rest, "__init__.py").is_file() for location in spec.submodule_search_locations or ())


def install_line(absent: dict[str, str]) -> str:
    """The command that installs what is absent; vime[cpu] is vime[gpu] on a machine with GPUs."""
    extras = ",".join(sorted(set(absent.values())))
    on_gpu = " (vime[gpu] on a machine with GPUs)" if "cpu" in extras else ""
    return f"pip install 'vime[{extras}]'{on_gpu}"
