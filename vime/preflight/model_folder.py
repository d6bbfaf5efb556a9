"""Is a Hugging Face folder whole? Read from config.json and the safetensors headers, without numpy or torch."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.json",
    INDEX,
)
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
NUM_SHOWN = 10


def check_parts(folder: Path) -> list[str]:
    """What a folder lacks: itself, config.json, tokenizer, weights."""
    if not folder.exists():
        return ["no such folder"]
    if not folder.is_dir():
        return ["is a file; give the Hugging Face folder"]
    problems = [] if (folder / "config.json").is_file() else ["has no config.json"]
    problems += [text for text in (_problem(folder / name) for name in JSON_FILES) if text]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        problems.append(f"has no tokenizer ({', '.join(TOKENIZER_FILES)})")
    if not (folder / INDEX).is_file() and not list(folder.glob("*.safetensors")):
        problems.append("has no *.safetensors file" + _other_weights(folder))
    return problems


def check_weights(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Problems of the weights: shards, headers, and names and shapes against ``expected`` of config.json."""
    files, problems = _shards(folder)
    found: Shapes = {}
    for file in files:
        shapes, problem = read_header(file)
        problems += [problem] if problem else []
        twice = sorted(shapes.keys() & found.keys())
        problems += [f"{file.name}: tensors that another file holds too: {_listed(twice)}"] if twice else []
        found |= shapes
    if problems:
        return problems
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [f"{n} {list(found[n])} instead of {list(s)}" for n, s in expected.items() if found.get(n, s) != s]
    problems += [f"lacks {len(missing)} tensors of the model: {_listed(missing)}"] if missing else []
    problems += [f"has {len(unexpected)} tensors that config.json has no place for: {_listed(unexpected)}"] * bool(
        unexpected
    )
    return problems + ([f"{len(wrong)} tensors do not fit config.json: {_listed(wrong)}"] if wrong else [])


def read_header(file: Path) -> tuple[Shapes, str | None]:
    """(name -> shape, problem) of one safetensors file: the 8-byte length, the JSON header, and the size it implies."""
    try:
        return _read_header(file)
    except OSError as error:
        return {}, f"{file.name}: cannot be read ({error.strerror})"


def _read_header(file: Path) -> tuple[Shapes, str | None]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return {}, f"{file.name}: is cut off, or no safetensors file ({size} bytes)"
        try:
            header = json.loads(stream.read(length))
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((int(header[name]["data_offsets"][1]) for name in shapes), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            return {}, f"{file.name}: its header cannot be read ({type(error).__name__}: {error})"
    if end != size:
        verb = "is cut off" if size < end else "has bytes left over"
        return {}, f"{file.name}: {verb}: {size} bytes, {end} by its header"
    return shapes, None


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer brings a chat template, in any of the places transformers reads it from."""
    if (folder / "chat_template.jinja").is_file() or (folder / "additional_chat_templates").is_dir():
        return True
    return any(bool((_json(folder / name) or {}).get("chat_template")) for name in TEMPLATE_FILES)


def chat_template_problem(folder: Path) -> str | None:
    """A syntax error of the chat template, found where jinja2 is installed. Tags of transformers are left to it."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            text = file.read_text(encoding="utf-8")
        else:
            text = next(t for t in ((_json(folder / name) or {}).get("chat_template") for name in TEMPLATE_FILES) if t)
    except StopIteration:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return f"{file.name} cannot be read ({error})"
    if not isinstance(text, str) or importlib.util.find_spec("jinja2") is None:
        return None
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        is_foreign = (error.message or "").startswith("Encountered unknown tag")
        return None if is_foreign else f"its chat template is broken at line {error.lineno}: {error.message}"
    return None


def _shards(folder: Path) -> tuple[list[Path], list[str]]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors")), []
    weight_map = (_json(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        return [], [f"{INDEX} has no weight_map"]
    names = sorted(set(map(str, weight_map.values())))
    absent = [name for name in names if not (folder / name).is_file()]
    problems = [f"{INDEX} names {len(absent)} files that are not there: {_listed(absent)}"] if absent else []
    return [folder / name for name in names if name not in absent], problems


def _json(file: Path) -> dict[str, Any] | None:
    """The object in a file, {} where there is no file, None where it is no JSON object or cannot be read."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return None
    return value if isinstance(value, dict) else None


def _problem(file: Path) -> str | None:
    """Why a JSON file of the folder cannot be used; None if it can, or is not there."""
    content = _json(file)
    if content is not None:
        is_empty = file.name == "tokenizer.json" and file.is_file() and "model" not in content
        return "tokenizer.json holds no tokenizer (it has no model)" if is_empty else None
    try:
        file.read_bytes()
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return f"{file.name} is no JSON object"


def _other_weights(folder: Path) -> str:
    other = [p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in folder.glob(pattern)]
    return f" (it has {_listed(other)}; convert to safetensors)" if other else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
