"""Checkpoints: what we write is the released format, what is damaged is found by name, what is none gets one error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonep_validate.formats import FormatError, identity
from moonep_validate.formats.kimi_k3 import ExpertTensor, Geometry, write_checkpoint
from moonep_validate.tools import plausible, shards
from moonep_validate.tools.checkpoint import inspect
from moonep_validate.tools.config import CHECKED, CheckpointError, read_config
from moonep_validate.tools.shards import Defect

Cli = Callable[..., tuple[int, str, str]]
GEOMETRY = Geometry().scaled(16, hidden=64, num_experts=12, top_k=3, moe_layers=2, shared_experts=0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("k3"), GEOMETRY, identity.source(GEOMETRY), shards=3)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "k3"))


def name(layer: int, expert: int, matrix: str, part: str = "weight_packed") -> str:
    return ExpertTensor(layer, expert, matrix, part).name()


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Edit the tensors of all shards, each in its own file; new names go to the first shard and into the index."""
    index = json.loads((folder / shards.INDEX).read_text())
    files = {path: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    everything = {key: tensor for tensors in files.values() for key, tensor in tensors.items()}
    home = {key: path for path, tensors in files.items() for key in tensors}
    edit(everything)
    first = next(iter(files))
    for path in files:
        save_file({key: value for key, value in everything.items() if home.get(key, first) == path}, path)
    index["weight_map"] = {key: home.get(key, first).name for key in everything}
    (folder / shards.INDEX).write_text(json.dumps(index))


def found(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> list[Defect]:
    change(folder, edit)
    return inspect(folder).findings


def test_names_shapes_and_bytes_are_those_of_the_release(written: Path) -> None:
    """The released sizes for one expert, and ours at a sixteenth."""
    whole = Geometry()
    tensor = ExpertTensor(92, 895, "w2", "weight_scale")
    assert tensor.name() == "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"
    released = {
        "w1": ((3072, 1792), (3072, 112)),
        "w3": ((3072, 1792), (3072, 112)),
        "w2": ((3584, 1536), (3584, 96)),
    }
    for matrix, shapes in released.items():
        assert (
            tuple(whole.shape(ExpertTensor(1, 0, matrix, part)) for part in ("weight_packed", "weight_scale"))
            == shapes
        )
    assert list(whole.layers) == list(range(1, 93))
    files = sorted(written.glob("*.safetensors"))
    assert files[0].name == "model-00001-of-00003.safetensors"
    headers, findings = shards.read_headers(written)
    assert findings == []
    assert (headers[name(1, 11, "w2")].dtype, headers[name(1, 11, "w2")].shape) == ("U8", (224, 96))
    assert headers[name(2, 0, "w1", "weight_scale")].shape == (192, 7)
    assert headers["language_model.model.layers.2.block_sparse_moe.gate.weight"].dtype == "BF16"
    assert headers["language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].dtype == "F32"
    config = json.loads((written / "config.json").read_text())["text_config"]
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert (config["routed_expert_hidden_size"], config["num_hidden_layers"]) == (224, 3)


def test_what_iswritten_is_read_again(written: Path) -> None:
    assert read_config(written) == Geometry(64, 224, 192, 12, 3, 2, 1, 0)
    seen = 0
    for path in written.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if parsed := ExpertTensor.parse(key):
                    tensor = parsed[0]
                    packed, scale = identity.weights(
                        *GEOMETRY.matrix(tensor.matrix), tensor.layer, tensor.expert, tensor.matrix
                    )
                    assert torch.equal(opened.get_tensor(key), packed if tensor.part == "weight_packed" else scale)
                    seen += 1
    assert seen == 2 * 12 * 6


def test_a_clean_checkpoint_has_no_findings_and_known_bytes(written: Path) -> None:
    told: list[tuple[int, int, str]] = []
    report = inspect(written, progress=lambda *arguments: told.append(arguments))
    assert report.findings == []
    assert [(done, total) for done, total, _ in told] == [(done, 144) for done in range(1, 145)]
    assert sorted(name for _, _, name in told) == sorted(report.experts.values())
    one = 3 * 224 * 192 * 17 // 32
    assert report.rank_bytes(4) == [2 * 3 * one] * 4
    assert sum(report.rank_bytes(1)) == 24 * one
    with pytest.raises(FormatError, match="--ep 5 does not divide the 12 experts"):
        report.rank_bytes(5)


def test_memory_is_one_piece_at_a_time(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(plausible, "PIECE", 1000)
    pieces = plausible._pieces

    def noted(data: Any) -> Any:
        for piece in pieces(data):
            sizes.append(piece.nbytes)
            yield piece

    monkeypatch.setattr(plausible, "_pieces", noted)
    assert inspect(written).findings == []
    assert max(sizes) <= 1000
    assert sum(sizes) == 24 * 3 * 224 * 192 * 17 // 32


@pytest.mark.parametrize("piece", [600, 4 * 2**20])
def test_nan_scales_are_named_with_their_place(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plausible, "PIECE", piece)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name(2, 7, "w3", "weight_scale")][150, 3] = 255
        tensors[name(2, 7, "w3", "weight_scale")][191, 6] = 255
        tensors[name(2, 7, "w1")][0, 0] = 255  # a code byte may be anything

    assert found(folder, edit) == [
        Defect("Y7", f"{name(2, 7, 'w3', 'weight_scale')}[150, 3]", "scale byte 0xFF (NaN); 2 of its bytes are")
    ]


def test_zero_constant_and_equal_experts_are_found(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name(1, 2, "w2")].fill_(0x80)  # zeros of both signs
        tensors[name(1, 3, "w1")].fill_(0x21)
        tensors[name(1, 3, "w1", "weight_scale")].fill_(126)
        tensors[name(1, 4, "w1")].fill_(0x21)  # constant codes, but scales differ: plausible
        for key in ("w1", "w2", "w3"):
            for part in ("weight_packed", "weight_scale"):
                tensors[name(2, 9, key, part)] = tensors[name(1, 5, key, part)].clone()
        tensors[name(2, 1, "w3")] = tensors[name(2, 1, "w1")].clone()

    assert found(folder, edit) == [
        Defect("Y12", "layer 1, expert 2, w2 (down)", "every value is zero"),
        Defect("Y12", "layer 1, expert 3, w1 (gate)", "every code byte is 33 and every scale byte 126"),
        Defect("Y12", "layer 2, expert 1", "w1 (gate) and w3 (up) have the same code bytes"),
        Defect("Y12", "layer 2, expert 9", "all its bytes are those of layer 1, expert 5"),
    ]


def test_missing_and_extra_experts_are_found(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for expert in (3, 4, 5, 11):
            for key in [key for key in tensors if f"layers.2.block_sparse_moe.experts.{expert}." in key]:
                del tensors[key]
        del tensors[name(1, 6, "w1", "weight_scale")]
        del tensors[name(1, 6, "w2")]
        tensors[name(1, 12, "w1")] = torch.arange(192 * 112).to(torch.uint8).reshape(192, 112)
        tensors[name(0, 0, "w1")] = torch.arange(192 * 112).to(torch.uint8).reshape(192, 112) + 1

    assert found(folder, edit) == [
        Defect("Y10", "layer 2", "experts 3-5, 11 are missing; the config says 12"),
        Defect("Y10", "layer 1, expert 6", "has no w1.weight_scale, w2.weight_packed"),
        Defect("Y10", "layer 0", "expert 0 is too many; the config has 12 experts in layers 1 to 2"),
        Defect("Y10", "layer 1", "expert 12 is too many; the config has 12 experts in layers 1 to 2"),
    ]


def test_shapes_and_dtypes_are_held_against_the_config(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for key in (name(1, 0, "w2"), name(1, 0, "w2", "weight_scale")):
            tensors[key] = tensors[key].T.contiguous()
        tensors[name(1, 1, "w1", "weight_scale")] = tensors[name(1, 1, "w1", "weight_scale")].float()
        tensors[name(1, 2, "w3", "weight_scale")] = tensors[name(1, 2, "w3", "weight_scale")].view(
            torch.float8_e8m0fnu
        )
        tensors[name(1, 3, "w3")] = tensors[name(1, 3, "w3")][:, :104].contiguous()

    by_name = {finding.where: (finding.id, finding.message) for finding in found(folder, edit)}
    assert by_name == {
        name(1, 0, "w2"): (
            "Y11",
            "shape is [96, 224], the config's w2 [224, 192] needs [224, 96]; this is its transpose",
        ),
        name(1, 0, "w2", "weight_scale"): (
            "Y11",
            "shape is [6, 224], the config's w2 [224, 192] needs [224, 6]; this is its transpose",
        ),
        name(1, 1, "w1", "weight_scale"): (
            "Y11",
            "dtype is F32, expected U8; a loader that copies values, not bytes, gets other scales",
        ),
        name(1, 2, "w3", "weight_scale"): (
            "Y11",
            "dtype is F8_E8M0, expected U8; a loader that copies values, not bytes, gets other scales",
        ),
        name(1, 3, "w3"): ("Y11", "shape is [192, 104], the config's w3 [192, 224] needs [192, 112]"),
    }


def test_the_index_is_held_against_the_files(folder: Path) -> None:
    path = folder / shards.INDEX
    index = json.loads(path.read_text())
    file = index["weight_map"].pop(name(1, 0, "w1"))
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    assert inspect(folder).findings == [
        Defect("Y10", "lm_head.weight", f"is in the index but not in {file}"),
        Defect("Y10", name(1, 0, "w1"), f"is in {file} but not in the index, so loaders skip it"),
    ]


def test_a_name_in_two_files_is_found_and_no_index_is_needed(folder: Path) -> None:
    (folder / shards.INDEX).unlink()
    assert inspect(folder).findings == []
    again = load_file(folder / "model-00001-of-00003.safetensors")
    save_file({name(1, 0, "w1"): again[name(1, 0, "w1")]}, folder / "model-extra.safetensors")
    where = "is in model-00001-of-00003.safetensors and again in model-extra.safetensors"
    assert inspect(folder).findings == [Defect("Y10", name(1, 0, "w1"), where)]


COPY = "copy.model"


def copied(tensors: dict[str, Tensor], root: str, layers: tuple[int, ...] = (1, 2)) -> dict[str, Tensor]:
    """The expert tensors of some layers under another root."""
    parsed = {key: ExpertTensor.parse(key) for key in tensors}
    return {
        one[0].name(root): tensors[key].clone()
        for key, one in parsed.items()
        if one is not None and one[0].layer in layers
    }


def test_a_complete_copy_under_another_root_hides_nothing(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors |= copied(tensors, COPY)
        del tensors[name(1, 6, "w2")]
        tensors[name(2, 3, "w1", "weight_scale")][4, 5] = 255

    assert found(folder, edit) == [
        Defect(
            "Y10",
            f"root {COPY}",
            "143 tensors of its experts are under root language_model.model too; a loader that goes by the end of a "
            "name takes the last",
        ),
        Defect("Y10", "layer 1, expert 6", "has no w2.weight_packed"),
        Defect("Y7", f"{name(2, 3, 'w1', 'weight_scale')}[4, 5]", "scale byte 0xFF (NaN); 1 of its bytes are"),
    ]
    assert len(inspect(folder).experts) == 143


def test_what_is_wrong_under_another_root_is_said_of_it(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors |= copied(tensors, "draft", (2,))
        del tensors[ExpertTensor(2, 1, "w3", "weight_scale").name("draft")]
        tensors[ExpertTensor(2, 4, "w1", "weight_packed").name("draft")].zero_()
        tensors[ExpertTensor(0, 0, "w1", "weight_packed").name("draft")] = tensors[name(1, 0, "w1")].clone()

    assert [(one.id, one.where) for one in found(folder, edit)] == [
        ("Y10", "root draft"),
        ("Y10", "layer 2, expert 1 under draft"),
        ("Y10", "layer 0 under draft"),
        ("Y12", "layer 2, expert 4, w1 (gate) under draft"),
    ]


def test_layers_split_over_roots_and_other_spellings_are_found(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        moved = copied(tensors, "model", (2,))
        for key in [key for key in tensors if ".layers.2." in key and ExpertTensor.parse(key)]:
            del tensors[key]
        tensors |= moved
        for place in ("experts.00", "experts.007"):
            tensors[name(1, 0, "w1").replace("experts.0", place)] = tensors[name(1, 0, "w1")].clone()

    assert found(folder, edit) == [
        Defect(
            "Y10",
            name(1, 0, "w1").replace("experts.0", place),
            f"is a second name of {name(1, expert, 'w1')}, which is there too; a loader may take either",
        )
        for place, expert in (("experts.00", 0), ("experts.007", 7))
    ] + [Defect("Y10", "layer 2", "is under root model only, the model's root is language_model.model")]


@pytest.mark.parametrize("indexed", ["first", "last"])
def test_both_copies_of_a_name_in_two_files_are_judged(indexed: str, folder: Path) -> None:
    """The file that the index names is the model's; the last wins where there is no index."""
    index = json.loads((folder / shards.INDEX).read_text())
    key = name(1, 0, "w1", "weight_scale")
    scales = load_file(folder / "model-00001-of-00003.safetensors")[key]
    scales[0, 0] = 255
    save_file({key: scales}, folder / "model-extra.safetensors")
    index["weight_map"]["extra"] = "model-extra.safetensors"
    if indexed == "last":
        index["weight_map"][key] = "model-extra.safetensors"
    (folder / shards.INDEX).write_text(json.dumps(index))
    where = f"{key}[0, 0]" + (" in model-extra.safetensors" if indexed == "first" else "")
    assert inspect(folder).findings[2:] == [Defect("Y7", where, "scale byte 0xFF (NaN); 1 of its bytes are")]


def scales_of(edit: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], None]:
    """Change the scales of one matrix."""
    return lambda tensors: edit(tensors[name(2, 7, "w3", "weight_scale")])


#: What is done to the scales ``[192, 7]`` of one matrix, which are 121 to 133 -> the beginning of what is said.
ODD_SCALES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "zero": (lambda t: t.zero_(), "every scale byte is 0; were values copied as bytes"),
    "copied": (lambda t: t.copy_(t % 9), "scale bytes are 0 to 8; were values copied as bytes"),
    "without bias": (lambda t: t.sub_(127), "7"),  # -6..6 as bytes: 250 to 255 and 0 to 6
    "one huge": (lambda t: t[3, 3].fill_(249), "1 scale bytes are above 137, up to 249 (2**122)"),
    "some zero": (lambda t: t[:2].zero_(), "14 scale bytes are 0 (2**-127), but only 0 of its blocks are zero"),
    "too small": (lambda t: t[:4].sub_(40), "28 of 1344 scale bytes are below 95 (2**-32), from 8"),
    "any": (lambda t: t.copy_(torch.arange(t.numel()).reshape(t.shape) % 40 + 96), "scale bytes from 96 to 13"),
    "far": (
        lambda t: t.sub_(8),
        "scale bytes are mostly 113 to 125, half of them up to 119; those of the layer's",
    ),
    "constant": (lambda t: t.fill_(127), "scale bytes are mostly 127 to 127, half of them up to 127; those of"),
}


@pytest.mark.parametrize("how", ODD_SCALES)
def test_scales_that_no_trained_layer_has_are_found(how: str, folder: Path) -> None:
    edit, words = ODD_SCALES[how]
    findings = [one for one in found(folder, scales_of(edit)) if one.id != "Y7"]
    assert {(one.id, one.where) for one in findings} == {("Y14", "layer 2, expert 7, w3 (up)")}
    assert findings[0].message.startswith(words) or how == "without bias"


def test_scales_of_zero_blocks_and_near_ones_are_plausible(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for expert in range(12):
            tensors[name(1, expert, "w1")][:9] = 0  # 9 rows of zeros, with scales 0 as encoders store them
            tensors[name(1, expert, "w1", "weight_scale")][:9] = 0
        tensors[name(2, 3, "w2", "weight_scale")] -= 5

    assert found(folder, edit) == []


@pytest.mark.parametrize(
    ("key", "value", "due"), [("group_size", 64, "32"), ("num_bits", 8, "4"), ("type", "int", "'float'")]
)
def test_the_quantisation_that_the_config_states_is_compared(
    key: str, value: object, due: str, folder: Path, cli: Cli
) -> None:
    rewrite(
        folder,
        lambda text: text["quantization_config"]["config_groups"]["group_0"]["weights"].update({key: value}),
    )
    said = Defect("Y11", "config.json", f"group_0: weights' {key} is {value!r}, MXFP4 has {due}")
    assert inspect(folder, content=False).findings == [said]
    assert cli("checkpoint", str(folder))[0] == 1
    rewrite(
        folder, lambda text: text["quantization_config"]["config_groups"]["group_0"]["weights"].update({key: None})
    )
    assert inspect(folder, content=False).findings == []


def rewrite(folder: Path, edit: Callable[[Any], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config["text_config"])
    (folder / "config.json").write_text(json.dumps(config))


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def garbage(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def pointer(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def missing(folder: Path) -> None:
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()


def outside(folder: Path) -> None:
    index = folder / shards.INDEX
    index.write_text(index.read_text().replace('"model-00001', '"../model-00001'))


def empty(folder: Path) -> None:
    for path in [folder / shards.INDEX, *folder.glob("*.safetensors")]:
        path.unlink()


def only_others(folder: Path) -> None:
    empty(folder)
    save_file({"lm_head.weight": torch.zeros(2, 3)}, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is not there: no checkpoint is here"),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json is not JSON: Expecting property name",
    ),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json is no JSON object"),
    "config no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe"),
        "config.json is not JSON: is not UTF-8: byte 0xff at 0",
    ),
    "text_config no object": (
        lambda f: (f / "config.json").write_text('{"text_config": 3}'),
        "text_config is no object",
    ),
    "key missing": (
        lambda f: rewrite(f, lambda t: t.pop("num_experts")),
        "num_experts or n_routed_experts or num_local_experts is null, a whole number",
    ),
    "key of another type": (
        lambda f: rewrite(f, lambda t: t.update(num_experts="12")),
        "num_local_experts is '12'",
    ),
    "key null": (
        lambda f: rewrite(f, lambda t: t.update(moe_intermediate_size=None)),
        "moe_intermediate_size is null",
    ),
    "key true": (lambda f: rewrite(f, lambda t: t.update(num_experts=True)), "num_local_experts is True"),
    "too many experts": (
        lambda f: rewrite(f, lambda t: t.update(num_experts=2**31)),
        "a whole number up to 1048576",
    ),
    "too many layers": (lambda f: rewrite(f, lambda t: t.update(num_hidden_layers=2**31)), "up to 1048576"),
    "too many of both": (
        lambda f: rewrite(f, lambda t: t.update(num_hidden_layers=2**20, num_experts=2**20)),
        "experts in 1048575 layers are 1099510579200, the limit is 1048576",
    ),
    "number too long": (
        lambda f: (f / "config.json").write_text('{"a": ' + "9" * 5000 + "}"),
        "is not JSON: Exceeds",
    ),
    "config too deep": (lambda f: (f / "config.json").write_text("[" * 10**6), "is nested too deep"),
    "config a pointer": (pointer("config.json"), "config.json is a Git LFS pointer"),
    "index a pointer": (pointer(shards.INDEX), "model.safetensors.index.json is a Git LFS pointer"),
    "config a pipe": (pipe, "config.json is not there"),
    "two shards missing": (
        missing,
        "names 2 of 3 files that are not there: model-00001-of-00003.safetensors, model-",
    ),
    "shard outside": (outside, "names '../model-00001-of-00003.safetensors', which is no file name"),
    "size impossible": (
        lambda f: rewrite(f, lambda t: t.update(moe_intermediate_size=100)),
        "intermediate is 100, no mul",
    ),
    "no dense layers left": (lambda f: rewrite(f, lambda t: t.update(num_hidden_layers=1)), "moe_layers is 0"),
    "not quantised": (lambda f: rewrite(f, lambda t: t.pop("quantization_config")), "no quantization_config"),
    "another format": (
        lambda f: rewrite(f, lambda t: t["quantization_config"].update(format="nvfp4-pack-quantized")),
        "quantization format is 'nvfp4-pack-quantized'; only mxfp4-pack-quantized",
    ),
    "sparse MoE layers": (lambda f: rewrite(f, lambda t: t.update(moe_layer_freq=2)), "moe_layer_freq is 2"),
    "shard missing": (
        lambda f: (f / "model-00003-of-00003.safetensors").unlink(),
        "names model-00003-of-00003.safetensors, which is not there",
    ),
    "shard cut short": (cut, "is damaged or cut short"),
    "shard a pointer file": (garbage, "is a Git LFS pointer, not the file itself: run git lfs pull"),
    "index no JSON": (lambda f: (f / shards.INDEX).write_text("weight_map"), "index.json is not JSON"),
    "index without map": (lambda f: (f / shards.INDEX).write_text('{"weight_map": []}'), "no weight_map"),
    "no files": (
        empty,
        "holds no safetensors file and no model.safetensors.index.json",
    ),
    "no experts": (only_others, "none of its 1 tensors is a routed expert"),
}


@pytest.mark.parametrize("why", BROKEN)
def test_what_cannot_be_read_is_one_usage_error(why: str, folder: Path, cli: Cli) -> None:
    damage, words = BROKEN[why]
    damage(folder)
    with pytest.raises(CheckpointError) as raised:
        inspect(folder)
    assert words in str(raised.value)
    assert str(folder) in str(raised.value)
    code, out, err = cli("checkpoint", str(folder))
    assert (code, out) == (4, "")
    assert err.count("moonep-validate: ") == 1
    assert words in err.replace("\n", " ")


def test_names_of_other_models_null_and_keys_that_no_check_uses(folder: Path) -> None:
    def other(text: dict[str, Any]) -> None:
        text["n_routed_experts"], text["num_experts_per_tok"] = text.pop("num_experts"), 3
        text["num_experts_per_token"], text["num_shared_experts"], text["n_shared_experts"] = None, None, 0
        text["moe_layer_freq"] = None

    rewrite(folder, other)
    assert read_config(folder, (*CHECKED, "top_k")) == GEOMETRY
    rewrite(folder, lambda text: text.update(hidden_size="64", num_experts_per_tok="3", n_shared_experts=[]))
    assert inspect(folder).findings == []
    with pytest.raises(CheckpointError, match="num_experts_per_token or num_experts_per_tok is '3'"):
        read_config(folder, (*CHECKED, "top_k"))
    rewrite(folder, lambda text: text.update(hidden_size=224, routed_expert_hidden_size=None))
    assert read_config(folder).latent == 224  # experts as wide as the model


def test_command_on_clean_and_damaged(folder: Path, cli: Cli) -> None:
    code, out, _ = cli("checkpoint", str(folder), "--ep", "3")
    assert code == 0
    assert "routed experts: 144 tensors, 1.6 MB (1.6 MiB); the config says 12 experts in 2 layers" in out
    assert out.count("548352 bytes of routed experts") == 3
    assert out.endswith("no findings\n")

    def edit(tensors: dict[str, Tensor]) -> None:
        for expert in range(12):
            tensors[name(1, expert, "w2", "weight_scale")][expert, 5] = 255
            tensors[name(2, expert, "w1")].zero_()

    change(folder, edit)
    code, out, _ = cli("checkpoint", str(folder))
    assert code == 1
    assert f"Y7 {name(1, 11, 'w2', 'weight_scale')}[11, 5]: scale byte 0xFF (NaN); 1 of its bytes are" in out
    assert "... and 4 more; --json has all" in out
    assert out.endswith("24 findings: 12 of Y12, 12 of Y7\n")
    code, out, _ = cli("checkpoint", str(folder), "--json", "--ep", "2")
    value = json.loads(out)
    assert (code, len(value["findings"]), value["ep"]) == (1, 24, 2)
    assert value["expert_bytes_per_rank"] == [value["expert_bytes"] // 2] * 2
    code, out, _ = cli("checkpoint", str(folder), "--headers-only")
    assert code == 0  # the data is not read, and the output says so
    assert "data not read (--headers-only)" in out


def test_an_ep_size_that_does_not_divide_is_a_usage_error(written: Path, cli: Cli) -> None:
    code, _, err = cli("checkpoint", str(written), "--ep", "5")
    assert code == 4
    assert "--ep 5 does not divide the 12 experts" in err


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"factor": 5}, "factor 5 does not divide hidden 7168"),
        ({"factor": 64}, "latent is 56, no multiple of the MXFP4 block of 32"),
        ({"factor": 16, "num_experts": 4}, "top_k is 16, but there are 4 experts"),
        ({"factor": 16, "moe_layers": 0}, "moe_layers is 0; it is a number from 1 on"),
    ],
)
def test_impossible_geometries_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Geometry().scaled(**sizes)


def test_names_of_other_tensors_are_no_experts() -> None:
    good = name(1, 3, "w1")
    assert ExpertTensor.parse(good) == (ExpertTensor(1, 3, "w1", "weight_packed"), "language_model.model")
    for bad in (
        good + ".x",
        good.replace("w1", "w4"),
        good.replace("experts.3", "experts.x"),
        "shared_experts.w1",
    ):
        assert ExpertTensor.parse(bad) is None
