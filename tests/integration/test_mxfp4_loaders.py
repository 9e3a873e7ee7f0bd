"""Engines' own loaders on MXFP4 experts, in this process on the CPU: do the checkpoint's bytes arrive?

vLLM's compressed-tensors, ``Mxfp4Config`` and gpt-oss methods, SGLang's MXFP4 ``FusedMoE``: layers are made by the
engine, loaded by its loader, and compared byte by byte with what was due, before any backend converts them. Seams:
the rank in the tensor-parallel group is stated, since there is one process; vLLM is told that the CPU has AMX, without
which it has no MXFP4 backend. Nothing runs forward here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moonep_validate.formats import identity, layouts, mxfp4
from moonep_validate.formats.kimi_k3 import ROLES, Geometry, Source
from moonep_validate.formats.layouts import Order, Packed
from moonep_validate.formats.loaded import Loaded, Shard, compare, due
from moonep_validate.formats.oracles import all_pairs
from moonep_validate.subjects.engines.sglang import _declare_torchvision
from moonep_validate.subjects.engines.vllm_probes import _HF_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore")  # engines warn at import; that is not what is judged here

GEOMETRY = Geometry().scaled(16, num_experts=5, top_k=2, moe_layers=1)  # latent 224, intermediate 192
SOURCE = identity.source(GEOMETRY)
LAYER = 1
EXPERTS = tuple(range(GEOMETRY.num_experts))
RANKS = ((0, 1), (0, 2), (1, 2), (2, 3))

#: How a checkpoint may spell scale bytes.
SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "uint8": lambda scale: scale,
    "float8_e8m0fnu": lambda scale: scale.view(torch.float8_e8m0fnu),
    "float32": mxfp4.scale_values,
    "bfloat16": lambda scale: mxfp4.scale_values(scale, torch.bfloat16),
}


class LoadPath(NamedTuple):
    """One way of an engine to load: what makes its quantisation config, and its names.

    Attributes:
        weight: how the engine calls packed codes; its scales are ``weight_scale``.
        order: how it fuses gate and up.
    """

    config: Callable[[], Any]
    weight: str
    order: Order = "w13"


class Engine(Protocol):
    """What differs between engines."""

    paths: dict[str, LoadPath]

    def make(self, path: str, rank: int, ranks: int) -> Any: ...

    def load(self, path: str, layer: Any, source: Source, spell: Callable[[Tensor], Tensor]) -> None: ...

    def parameters(self, layer: Any) -> dict[str, Any]: ...


class Vllm:
    def __init__(self, folder: Path, kept: ExitStack) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        self._serial = 0
        self._rank, self._ranks = 0, 1
        config = import_module("vllm.config")
        (folder / "config.json").write_text(json.dumps(_HF_CONFIG))
        model = config.ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        )
        self._config = config.VllmConfig(model_config=model, device_config=config.DeviceConfig(device="cpu"))
        kept.enter_context(config.set_current_vllm_config(self._config))
        state = import_module("vllm.distributed.parallel_state")
        state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        state.initialize_model_parallel(backend="gloo")
        kept.callback(state.cleanup_dist_env_and_memory)
        kept.enter_context(patch("torch.cpu._is_amx_tile_supported", lambda: True))
        kept.enter_context(patch(f"{_VLLM_CONFIG}.get_tensor_model_parallel_rank", lambda: self._rank))
        gpt_oss = "vllm.model_executor.models.gpt_oss"
        import_module(gpt_oss)
        kept.enter_context(patch(f"{gpt_oss}.get_tensor_model_parallel_world_size", lambda: self._ranks))
        quantization = "vllm.model_executor.layers.quantization"
        tensors = import_module(f"{quantization}.compressed_tensors.compressed_tensors").CompressedTensorsConfig
        mxfp4_configs = import_module(f"{quantization}.mxfp4")
        released = GEOMETRY.config()["text_config"]["quantization_config"]
        self.paths = {
            "compressed-tensors": LoadPath(lambda: tensors.from_config(released), "weight_packed"),
            "Mxfp4Config": LoadPath(mxfp4_configs.Mxfp4Config, "weight"),
            "gpt-oss": LoadPath(mxfp4_configs.GptOssMxfp4Config, "weight", "interleaved"),
        }

    def make(self, path: str, rank: int, ranks: int) -> Any:
        self._serial += 1
        self._rank, self._ranks = rank, ranks
        return import_module("vllm.model_executor.layers.fused_moe").FusedMoEFactory(
            num_experts=GEOMETRY.num_experts,
            top_k=GEOMETRY.top_k,
            hidden_size=GEOMETRY.latent,
            intermediate_size=GEOMETRY.intermediate,
            params_dtype=torch.bfloat16,
            quant_config=self.paths[path].config(),
            prefix=f"layers.{self._serial}.block_sparse_moe.experts",
            ckpt_names=("w1", "w2", "w3"),
            tp_size=ranks,
        )

    def load(self, path: str, layer: Any, source: Source, spell: Callable[[Tensor], Tensor]) -> None:
        if path == "gpt-oss":
            _load_gpt_oss(layer, source, spell)
            return
        weight = self.paths[path].weight
        tensors = (
            (f"{expert}.{matrix}.{name}", tensor)
            for expert, matrix, packed, scale in _checkpoint(source)
            for name, tensor in ((weight, packed), ("weight_scale", spell(scale)))
        )
        assert len(list(layer.load_weights(tensors))) == 6 * len(EXPERTS)

    def parameters(self, layer: Any) -> dict[str, Any]:
        return dict(layer.routed_experts.named_parameters())


class Sglang:
    def __init__(self, folder: Path, kept: ExitStack) -> None:
        os.environ.update(HF_HUB_OFFLINE="1")
        _declare_torchvision()
        arguments = import_module("sglang.srt.server_args").ServerArgs(model_path="dummy", device="cpu")
        self._context: Any = import_module("sglang.srt.runtime_context")
        self._context.publish(arguments, role="test")
        state = import_module("sglang.srt.distributed.parallel_state")
        state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        kept.callback(torch.distributed.destroy_process_group)
        import_module("sglang.srt.layers.moe.utils").initialize_moe_config()
        config = import_module("sglang.srt.layers.quantization.mxfp4").Mxfp4Config
        make = lambda: config(is_checkpoint_mxfp4_serialized=True)  # noqa: E731
        self.paths = {
            "per expert": LoadPath(make, "weight"),
            "per expert, up first": LoadPath(make, "weight", "w31"),
            "stacked": LoadPath(make, "weight", "interleaved"),
        }
        self._layers = 0

    def make(self, path: str, rank: int, ranks: int) -> Any:
        config = self.paths[path].config()
        layer_class = import_module("sglang.srt.layers.moe.ep_moe.layer").get_moe_impl_class(config)
        self._layers += 1
        groups = ("tp", "attn_tp", "moe_tp")
        place = {f"{group}_size": ranks for group in groups} | {f"{group}_rank": rank for group in groups}
        with self._context.get_parallel().override(moe_ep_size=1, moe_ep_rank=0, **place):
            layer = layer_class(
                num_experts=GEOMETRY.num_experts,
                top_k=GEOMETRY.top_k,
                hidden_size=GEOMETRY.latent,
                intermediate_size=GEOMETRY.intermediate,
                layer_id=self._layers,
                params_dtype=torch.bfloat16,
                prefix=f"layers.{self._layers}.block_sparse_moe.experts",
                quant_config=config,
            )
        if self.paths[path].order == "w31":  # what a quantisation method sets whose kernel wants it so
            layer.quant_method.load_up_proj_weight_first = True
        return layer

    def load(self, path: str, layer: Any, source: Source, spell: Callable[[Tensor], Tensor]) -> None:
        parameters = self.parameters(layer)
        if path == "stacked":  # the model cuts; the loader copies
            for name, tensor in _stacked(source, spell, layer.moe_tp_rank, layer.moe_tp_size).items():
                parameter = parameters[name]
                parameter.weight_loader(parameter, tensor, name, shard_id=None, expert_id=None)
            return
        mapping = layer.make_expert_params_mapping("w1", "w2", "w3", len(EXPERTS))
        targets = {
            named: (prefix.removeprefix("experts."), expert, shard) for prefix, named, expert, shard in mapping
        }
        for expert, matrix, packed, scale in _checkpoint(source):
            named = f"experts.{expert}.{matrix}."
            prefix, number, shard = targets[named]
            for part, tensor in (("weight", packed), ("weight_scale", spell(scale))):
                parameter = parameters[prefix + part]
                parameter.weight_loader(parameter, tensor, named + part, shard_id=shard, expert_id=number)

    def parameters(self, layer: Any) -> dict[str, Any]:
        return dict(layer.named_parameters())


# A conversion and a decoder that are plain torch, so that they run here.


def test_vllms_scale_tiles_are_ours(engine: Engine) -> None:
    """What its CUTLASS backend does to scales; row-major scales, the usual mistake, are not the same."""
    if not isinstance(engine, Vllm):
        pytest.skip("vLLM's")
    swizzle = import_module("vllm.model_executor.layers.fused_moe.experts.cutlass_moe").swizzle_mxfp4_scales
    for rows, groups in ((384, 7), (224, 6), (100, 3), (3072, 112)):
        scale = identity.weights(rows, groups * mxfp4.BLOCK, 1, 2, "w1")[1]
        got = swizzle(scale, rows, groups * mxfp4.BLOCK)
        assert torch.equal(got.flatten(), layouts.to_blocked(scale)), (rows, groups)
        assert not torch.equal(layouts.from_blocked(got.flatten(), rows, groups), scale.roll(1, 0))


def test_sglangs_own_decoder_agrees_on_all_pairs(engine: Engine) -> None:
    """Its quantiser is not judged: in 0.5.23 it raises, since its class takes no arguments."""
    if not isinstance(engine, Sglang):
        pytest.skip("SGLang's")
    util = import_module("sglang.srt.layers.quantization.mxfp4_tensor").MXFP4QuantizeUtil
    packed, scale = (one[:255] for one in all_pairs())
    got = util.dequantize(packed, torch.float32, scale, [mxfp4.BLOCK])
    assert torch.equal(got, mxfp4.decode(packed, scale))
    wrong = util.dequantize(layouts.swap_nibbles(packed), torch.float32, scale, [mxfp4.BLOCK])
    assert not torch.equal(wrong, got)


ENGINES: dict[str, Callable[[Path, ExitStack], Engine]] = {"vllm": Vllm, "sglang": Sglang}
PATHS = {
    "vllm": ("compressed-tensors", "Mxfp4Config", "gpt-oss"),
    "sglang": ("per expert", "per expert, up first", "stacked"),
}
_VLLM_CONFIG = "vllm.model_executor.layers.fused_moe.config"


def _checkpoint(source: Source) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    for expert in EXPERTS:
        for matrix in ROLES:
            yield (expert, matrix, *source(LAYER, expert, matrix))


def _stacked(source: Source, spell: Callable[[Tensor], Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A gpt-oss checkpoint's tensors, cut for a rank: all experts at once, gate and up rows alternating."""
    cut = due(source, GEOMETRY, LAYER, Shard(EXPERTS, rank, ranks, "interleaved"))
    return {
        "w13_weight": cut.w13,
        "w13_weight_scale": spell(cut.w13_scale),
        "w2_weight": cut.w2,
        "w2_weight_scale": spell(cut.w2_scale),
    }


def _load_gpt_oss(layer: Any, source: Source, spell: Callable[[Tensor], Tensor]) -> None:
    """By vLLM's model of gpt-oss, which cuts shards itself: ``[E, 2I, H/32, 16]`` blocks, rows alternating."""
    model_class = import_module("vllm.model_executor.models.gpt_oss").GptOssModel
    model = object.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.experts = layer
    model.parallel_config = SimpleNamespace(enable_expert_parallel=False)
    model.config = SimpleNamespace(num_local_experts=len(EXPERTS), intermediate_size=GEOMETRY.intermediate)
    whole = _stacked(source, spell, 0, 1)
    names = {name.rsplit(".", 1)[-1]: name for name, _ in model.named_parameters()}
    tensors = (
        (names[name], tensor if "scale" in name else tensor.unflatten(-1, (-1, 16)))
        for name, tensor in whole.items()
    )
    loaded = model._load_weights_mxfp4(0, 0, 1, 0, tensors, [])
    assert loaded == {names[name] for name in whole}


@pytest.fixture(scope="session")
def _started(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine | str]:
    """The engine, started in this process once; or why it cannot be."""
    name: str = pytestconfig.getoption("--moonep-subject")
    if name not in ENGINES:
        yield f"{name}: its loaders are not known here; known: {', '.join(ENGINES)}"
        return
    with ExitStack() as kept:
        if find_spec(name) is None:
            yield f"{name} is not installed here"
            return
        yield ENGINES[name](tmp_path_factory.mktemp("loaders"), kept)


@pytest.fixture
def engine(_started: Engine | str) -> Engine:
    if isinstance(_started, str):
        pytest.skip(_started)
    return _started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        subject = metafunc.config.getoption("--moonep-subject")
        metafunc.parametrize("path", PATHS.get(subject, ("none",)))


def made(engine: Engine, path: str, rank: int, ranks: int) -> Any:
    """A layer, or a skip that says what the engine raised."""
    try:
        return engine.make(path, rank, ranks)
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        pytest.skip(f"{path} cannot be made on this CPU: {type(error).__name__}: {error}")


def loaded(engine: Engine, path: str, layer: Any) -> Loaded:
    weight = engine.paths[path].weight
    found = engine.parameters(layer)
    names = (f"w13_{weight}", "w13_weight_scale", f"w2_{weight}", "w2_weight_scale")
    return Loaded(*(found[name].data for name in names))


def differences(
    engine: Engine, path: str, rank: int = 0, ranks: int = 1, source: Source = SOURCE, spelling: str = "uint8"
) -> list[str]:
    """Load ``source`` by the engine, and compare with what the right checkpoint asks for."""
    layer = made(engine, path, rank, ranks)
    engine.load(path, layer, source, SPELLINGS[spelling])
    got = loaded(engine, path, layer)
    shard = Shard(EXPERTS, rank, ranks, engine.paths[path].order)
    rows, columns = got.w13.shape[1] // 2, got.w13.shape[2] * 2
    plain = due(SOURCE, GEOMETRY, LAYER, shard)
    if got.w13.shape != plain.w13.shape:  # the engine pads: to multiples of its own sizes here
        shard = shard._replace(rows_to=rows, columns_to=columns)
    return compare(got, due(SOURCE, GEOMETRY, LAYER, shard), GEOMETRY, LAYER, shard)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_every_byte_of_every_expert_arrives(engine: Engine, path: str, rank: int, ranks: int) -> None:
    assert differences(engine, path, rank, ranks) == []


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "uint8"])
def test_scales_arrive_however_they_are_spelt(
    engine: Engine, path: str, spelling: str, request: pytest.FixtureRequest
) -> None:
    """A path that takes scale values and stores other bytes has lost every weight; refusing them is as good."""
    if path != "Mxfp4Config":
        reason = f"{path} copies scale values into uint8: 4.0, which is byte 129, becomes byte 4"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    try:
        found = differences(engine, path, spelling=spelling)
    except (TypeError, ValueError):
        return
    assert found == []


def test_a_cut_inside_a_block_is_refused_or_made_at_blocks(
    engine: Engine, path: str, request: pytest.FixtureRequest
) -> None:
    """192 over 4 ranks is 48 each, one and a half blocks: the down projection's scales cannot be cut there."""
    if path not in ("gpt-oss", "stacked"):
        reason = f"{path} cuts codes at 48 elements and scales at one block"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    try:
        layer = engine.make(path, 1, 4)
        if path == "stacked":  # the model cuts, and we are the model here: nothing of SGLang's to judge
            pytest.skip("the layer is given shards that are cut already")
        engine.load(path, layer, SOURCE, SPELLINGS["uint8"])
    except (AssertionError, ValueError):
        return
    whole_blocks = due(
        SOURCE, GEOMETRY, LAYER, Shard(EXPERTS, 1, 3, engine.paths[path].order)
    )  # 64 each, none for the last
    assert torch.equal(loaded(engine, path, layer).w2_scale, whole_blocks.w2_scale)
    assert torch.equal(loaded(engine, path, layer).w2, whole_blocks.w2)


def test_a_scale_that_is_no_power_of_two_is_refused(
    engine: Engine, path: str, request: pytest.FixtureRequest
) -> None:
    """It has no byte; rounded, a block is wrong by up to the square root of two."""
    reason = f"{path} rounds or cuts 1.5 times a power of two"
    request.applymarker(pytest.mark.xfail(reason=reason, raises=pytest.fail.Exception, strict=True))
    layer = made(engine, path, 0, 1)
    with pytest.raises((TypeError, ValueError)):
        engine.load(path, layer, SOURCE, lambda scale: 1.5 * mxfp4.scale_values(scale))


def swapped(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
    return SOURCE(layer, expert, {"w1": "w3", "w3": "w1"}.get(matrix, matrix))


def shifted(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
    packed, scale = SOURCE(layer, expert, matrix)
    return packed, scale.roll(1, 0)


def next_expert(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
    return SOURCE(layer, (expert + 1) % len(EXPERTS), matrix)


def nibbles(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
    packed, scale = SOURCE(layer, expert, matrix)
    return layouts.swap_nibbles(packed), scale


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (swapped, "gate and up rows are in order"),
        (shifted, "scale bytes are not those of their codes"),
        (next_expert, "got expert 1 gate rows"),
        (nibbles, "the nibbles of a byte are swapped"),
    ],
)
def test_a_wrong_checkpoint_is_told(engine: Engine, path: str, source: Source, words: str) -> None:
    """The negative control: what is due does not follow from what was loaded."""
    lines = differences(engine, path, source=source)
    assert len(EXPERTS) <= len([line for line in lines if line.startswith("local expert")])
    if source is swapped and path in ("gpt-oss", "stacked"):
        words = "gate and up rows are in order interleaved_up_first"
    assert words in "\n".join(lines)


def test_the_loaded_values_are_the_checkpoints(engine: Engine, path: str) -> None:
    layer = made(engine, path, 1, 2)
    engine.load(path, layer, SOURCE, SPELLINGS["uint8"])
    got = loaded(engine, path, layer)
    gate, up = (
        mxfp4.decode(*Packed(*half))
        for half in zip(*(layouts.split(tensor, engine.paths[path].order) for tensor in got.fused), strict=True)
    )
    down = mxfp4.decode(*got.down)
    for expert in EXPERTS:
        assert torch.equal(gate[expert, :96, :224], mxfp4.decode(*SOURCE(LAYER, expert, "w1"))[96:])
        assert torch.equal(up[expert, :96, :224], mxfp4.decode(*SOURCE(LAYER, expert, "w3"))[96:])
        assert torch.equal(down[expert, :224, :96], mxfp4.decode(*SOURCE(LAYER, expert, "w2"))[:, 96:])
