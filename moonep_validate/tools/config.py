"""Which routed experts does a ``config.json`` state? Names that models use, null as absent, limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moonep_validate.formats import FormatError
from moonep_validate.formats.kimi_k3 import FORMAT, Geometry
from moonep_validate.formats.mxfp4 import BLOCK
from moonep_validate.trace.schema import SchemaError, decoded, one_line, parsed, read_bytes, shown

#: Field of the geometry -> names in configs, Kimi-K3's own first.
KEYS = {
    "hidden": ("hidden_size",),
    "latent": ("routed_expert_hidden_size",),
    "intermediate": ("moe_intermediate_size",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_token", "num_experts_per_tok"),
    "moe_layers": ("num_hidden_layers",),
    "first_moe_layer": ("first_k_dense_replace",),
    "shared_experts": ("num_shared_experts", "n_shared_experts"),
}
#: What the inspection of a checkpoint compares; ``memory`` needs ``top_k`` too.
CHECKED = ("latent", "intermediate", "num_experts", "moe_layers")
#: What the quantisation of MXFP4 weights states, as in the release.
STATED = {"num_bits": 4, "type": "float", "group_size": BLOCK}
#: Largest value of a size, and of experts times layers; bytes of a JSON file.
MAX_SIZE, MAX_PLACES, MAX_JSON = 2**20, 2**20, 2**28
_LFS = b"version https://git-lfs.github.com/spec/"


class CheckpointError(FormatError):
    """A folder that is not a readable checkpoint of this kind; the message names the file and what is wrong."""


def read_config(folder: Path, needed: Collection[str] = CHECKED) -> Geometry:
    """The geometry that ``config.json`` states.

    Args:
        folder: of the checkpoint.
        needed: fields without which there is no answer; what is not needed may be absent or odd.

    Raises:
        CheckpointError: if there is none, a key is missing, or the format is another one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    path = folder / "config.json"
    config = read_json(path, "no checkpoint is here, or its config is missing")
    text = _first(config, "text_config") or config
    try:
        if not isinstance(text, dict):
            raise SchemaError("text_config is no object")
        _check_format(config, text)
        return _geometry({name: _size(text, name, name in needed) for name in KEYS})
    except (FormatError, SchemaError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _geometry(found: dict[str, int | None]) -> Geometry:
    """Sizes as they are, those that are absent and not needed as in a model without the feature."""
    dense, layers = found["first_moe_layer"] or 0, found["moe_layers"] or 0
    latent = found["latent"] or found["hidden"] or 0
    rest = {"hidden": latent, "top_k": 1, "shared_experts": 0, "first_moe_layer": dense}
    sizes = {name: rest.get(name, 0) if value is None else value for name, value in found.items()}
    one = Geometry(**{**sizes, "latent": latent, "moe_layers": layers - dense})
    if one.num_experts * one.moe_layers > MAX_PLACES:
        raise SchemaError(
            f"{one.num_experts} experts in {one.moe_layers} layers are {one.num_experts * one.moe_layers}, "
            f"the limit is {MAX_PLACES}"
        )
    return one


def _size(text: Mapping[str, Any], name: str, needed: bool) -> int | None:
    value = _first(text, *KEYS[name])
    if name == "latent" and value is None:  # without a latent width, experts are as wide as the model
        return _size(text, "hidden", needed)
    if type(value) is int and 0 <= value <= MAX_SIZE:
        return value
    if needed or (name == "first_moe_layer" and value is not None):
        what = f"a whole number up to {MAX_SIZE} is needed there"
        raise SchemaError(f"{' or '.join(KEYS[name])} is {shown(value)}, {what}")
    return None


def _first(data: Mapping[str, Any], *names: str) -> Any:
    """The first value that is there and not null."""
    return next((data[name] for name in names if data.get(name) is not None), None)


def _check_format(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    quantization = _first(text, "quantization_config") or _first(config, "quantization_config")
    if not isinstance(quantization, dict):
        raise SchemaError("no quantization_config, so its experts are not MXFP4")
    if (got := quantization.get("format")) != FORMAT:
        raise SchemaError(f"quantization format is {shown(got)}; only {FORMAT} is known here")
    if (every := _first(text, "moe_layer_freq") or 1) != 1:
        raise SchemaError(f"moe_layer_freq is {shown(every)}; only 1 is known here")


def other_quantization(folder: Path) -> list[str]:
    """What ``config.json`` states of its groups of weights and MXFP4 is not; absent and null are not judged."""
    config = read_json(folder / "config.json")
    text = _first(config, "text_config") or config
    quantization = _first(text, "quantization_config") or _first(config, "quantization_config") or {}
    groups = quantization.get("config_groups")
    found = []
    for group, stated in (groups if isinstance(groups, dict) else {}).items():
        weights = stated.get("weights") if isinstance(stated, dict) else None
        for key, due in STATED.items():
            value = weights.get(key) if isinstance(weights, dict) else None
            if value is not None and (type(value), value) != (type(due), due):
                found.append(
                    f"{one_line(str(group))[:80]}: weights' {key} is {shown(value)}, MXFP4 has {shown(due)}"
                )
    return found


def read_json(path: Path, hint: str = "") -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Args:
        path: of the file.
        hint: what it means if it is not there.

    Raises:
        CheckpointError: if it is not there or no JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there" + (f": {hint}" if hint else ""))
    try:
        data = read_bytes(path, MAX_JSON)
        refuse_pointer(path, data)
        value = parsed(decoded(data))
    except SchemaError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return value


def refuse_pointer(path: Path, data: bytes) -> None:
    """Refuse the text that Git LFS leaves in the place of a file.

    Raises:
        CheckpointError: with the command that brings the file.
    """
    if data.startswith(_LFS):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its repository"
        )
