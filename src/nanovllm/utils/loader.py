"""Fills a model from safetensors files, every parameter exactly once.

The model, not the files, says which tensors there must be: each of its parameters is one tensor of
the checkpoint, or, for a packed module, several. A weight that is missing, unknown or mis-shaped is
an error, since an uninitialised one computes nonsense without a sign (LOD-1..3).
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from torch import nn

from nanovllm.layers.weight import ShardId

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

Target = tuple[nn.Parameter, ShardId]


def load_model(
    model: nn.Module, path: str | Path, *, unexpected: Literal["error", "warn"] = "error"
) -> None:
    """Loads the checkpoint in directory `path` into `model`, cast to its parameters' dtypes.

    Raises ValueError, naming every tensor concerned, for tensors that are missing, mis-shaped, or
    unknown to the model; with `unexpected="warn"` the last is a UserWarning. Exempt are a second
    copy of a tied weight, and `*.inv_freq`. Raises FileNotFoundError for files that do not exist.
    """
    targets = _tensors_of(model)
    files = _locate_tensors(Path(path))
    unknown = sorted(files.keys() - targets.keys() - _tied_names(model))
    unknown = [name for name in unknown if not name.endswith(".inv_freq")]
    problems = [f"{name} is missing" for name in sorted(targets.keys() - files.keys())]
    if unexpected == "error":
        problems += [f"{name} is not a tensor of the model" for name in unknown]
    elif unknown:
        warnings.warn(f"ignored tensors unknown to the model: {', '.join(unknown)}", stacklevel=2)

    names_by_file = defaultdict(list)
    for name in sorted(targets.keys() & files.keys()):
        names_by_file[files[name]].append(name)
    for file, names in names_by_file.items():
        problems += _load_file(file, {name: targets[name] for name in names})
    if problems:
        raise ValueError(f"cannot load {path}:\n  " + "\n  ".join(problems))


def _tensors_of(model: nn.Module) -> dict[str, Target]:
    """The name in the checkpoint of every tensor that the model needs, and where it goes."""
    packed_modules: Mapping[str, tuple[str, ShardId]] = getattr(model, "packed_modules_mapping", {})
    parts_of = defaultdict(list)
    for part, (packed, shard_id) in packed_modules.items():
        parts_of[packed].append((part, shard_id))
    targets: dict[str, Target] = {}
    for name, param in model.named_parameters():
        *parents, module, leaf = name.split(".")
        for part, shard_id in parts_of.get(module, [(module, None)]):
            targets[".".join([*parents, part, leaf])] = (param, shard_id)
    return targets


def _tied_names(model: nn.Module) -> set[str]:
    """Further names of parameters that have several, such as a tied `lm_head.weight`."""
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every_name - {name for name, _ in model.named_parameters()}


def _locate_tensors(directory: Path) -> dict[str, Path]:
    """The file of each tensor. An index decides alone: files it does not name are ignored."""
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({f for f in weight_map.values() if not (directory / f).is_file()})
        if absent:
            raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(absent)}")
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / SINGLE_FILE
    if not single.is_file():
        raise FileNotFoundError(f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _load_file(path: Path, targets: Mapping[str, Target]) -> list[str]:
    """Loads `targets` from one file, and says what was wrong with which."""
    problems = []
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        for name, (param, shard_id) in sorted(targets.items()):
            if name not in stored:
                problems.append(f"{name} is missing from {path.name}, where the index places it")
                continue
            try:
                param.weight_loader(param, file.get_tensor(name), shard_id)  # type: ignore[attr-defined]
            except ValueError as error:
                problems.append(f"{name} {error}")
    return problems
