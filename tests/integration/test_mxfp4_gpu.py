"""vLLM's Marlin MXFP4 experts on one GPU: does what it made of a checkpoint's bytes multiply as they say?

Layers are made, loaded and converted by vLLM (compressed-tensors, ``Mxfp4Config``, gpt-oss), or its conversion and
kernel are called by themselves. Their output is held against the decoded weights in float64, within the bound of
the stated rounding points. What the conversion did to each byte is read back through the kernel: unit vectors in,
one product per output, so every decoded value comes out exactly. Also DeepGEMM's own layouts of scales.

Run: ``pytest -s tests/integration/test_mxfp4_gpu.py`` on a machine with a GPU of compute capability 7.5 or more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moonep_validate.formats import identity, layouts, mxfp4
from moonep_validate.formats.kimi_k3 import ROLES, Geometry, Source
from moonep_validate.formats.layouts import Order
from moonep_validate.formats.loaded import Loaded, Shard, due
from moonep_validate.hashing import hashed, normal, unit
from moonep_validate.judge.oracle.activation import SILU, SITU, Activation
from moonep_validate.judge.oracle.arithmetic import Arithmetic
from moonep_validate.judge.oracle.bounds import SIGMAS
from moonep_validate.judge.oracle.dense import dense_layer
from moonep_validate.subjects.engines.vllm import Vllm
from moonep_validate.subjects.engines.vllm_probes import HF_CONFIG
from moonep_validate.subjects.experts import deepgemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # vLLM warns at import; that is not what is judged here
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no GPU"),
]

#: Sizes that Marlin takes as they are, and sizes that ``Mxfp4Config`` grows to 512 and 256 for it.
PLAIN = Geometry(hidden=1024, latent=512, intermediate=384, num_experts=5, top_k=2, moe_layers=1)
UNEVEN = Geometry(hidden=1024, latent=448, intermediate=192, num_experts=5, top_k=2, moe_layers=1)
LAYER, TOKENS = 1, 37
DEVICE = "cuda"
EXPERTS = tuple(range(PLAIN.num_experts))
#: Gates of about 2.7 standard deviations, so that SiTU's and gpt-oss's caps are reached, and SiLU is not linear.
INPUT_SCALE = 2.0**-9

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_MARLIN = "vllm.model_executor.layers.fused_moe.experts.marlin_moe"


def _gpt_oss_gate(g: Tensor) -> tuple[Tensor, Tensor]:
    capped = g.clamp(max=7.0)
    sigmoid = torch.sigmoid(1.702 * capped)
    return capped * sigmoid, torch.where(g < 7.0, sigmoid * (1 + 1.702 * capped * (1 - sigmoid)), 0.0)


def _gpt_oss_up(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.clamp(-7.0, 7.0) + 1, (u.abs() < 7.0).to(u.dtype)


#: gpt-oss's: a clamped gate with a steeper sigmoid, times a clamped up plus one.
GPT_OSS = Activation(_gpt_oss_gate, _gpt_oss_up)
#: Of Marlin's two products and of vLLM's activation, beyond those that the oracle always counts.
ROUNDS = ("silu", "route_weight")


class Kind(NamedTuple):
    """One way to the kernel.

    Attributes:
        method: ``kernel``, or the quantisation method that vLLM makes the layer with.
        order: of the fused gate and up rows that its activation takes.
        arguments: of vLLM's factory, beyond the sizes.
        activation: what that computes.
    """

    method: str
    order: Order = "w13"
    arguments: Mapping[str, Any] = MappingProxyType({})
    activation: Activation = SILU
    geometry: Geometry = PLAIN


_SITU: dict[str, Any] = {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
KINDS = {
    "kernel": Kind("kernel"),
    "compressed-tensors": Kind("compressed-tensors"),
    "compressed-tensors, situ": Kind("compressed-tensors", arguments=_SITU, activation=SITU),
    "Mxfp4Config": Kind("Mxfp4Config"),
    "Mxfp4Config, padded": Kind("Mxfp4Config", geometry=UNEVEN),
    "gpt-oss": Kind("gpt-oss", "interleaved", {"activation": "swigluoai"}, GPT_OSS),
}


@dataclass(frozen=True)
class Made:
    """Converted experts.

    Attributes:
        weights: as the kernel takes them: w13, w2 and their scales.
        forward: hidden states, route weights and expert ids to output.
    """

    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]


class Engine:
    """vLLM in this process: one rank, one GPU."""

    def __init__(self, folder: Path, kept: ExitStack) -> None:
        self._folder, self._kept, self._serial = folder, kept, 0
        self._config: Any = None

    def make(self, kind: Kind, source: Source) -> Made:
        """Load and convert by vLLM."""
        return self._kernel(source) if kind.method == "kernel" else self._layer(kind, source)

    def _kernel(self, source: Source) -> Made:
        """Conversion and kernel of vLLM without a layer around them."""
        loaded = loaded_of(source, KINDS["kernel"])
        convert = import_module(f"{_QUANTIZATION}.utils.marlin_utils_fp4").prepare_moe_mxfp4_layer_for_marlin
        layer = SimpleNamespace(params_dtype=torch.bfloat16)
        given = (tensor.to(DEVICE) for tensor in (loaded.w13, loaded.w2, loaded.w13_scale, loaded.w2_scale))
        w13, w2, w13_scale, w2_scale, *_ = convert(layer, *given, None, None)
        weights = (w13, w2, w13_scale, w2_scale)
        return Made(weights, lambda x, factors, ids: fused(weights, x, factors, ids))

    def _layer(self, kind: Kind, source: Source) -> Made:
        config = self._started()
        self._serial += 1
        routes: list[tuple[Tensor, Tensor]] = []
        current = import_module("vllm.config").set_current_vllm_config
        with current(config), torch.device(DEVICE):
            runner = import_module("vllm.model_executor.layers.fused_moe").FusedMoEFactory(
                num_experts=len(EXPERTS),
                top_k=kind.geometry.top_k,
                hidden_size=kind.geometry.latent,
                intermediate_size=kind.geometry.intermediate,
                params_dtype=torch.bfloat16,
                quant_config=_quant_config(kind),
                prefix=f"layers.{self._serial}.block_sparse_moe.experts",
                ckpt_names=("w1", "w2", "w3"),
                renormalize=False,
                custom_routing_function=lambda **_: routes[-1],
                **kind.arguments,
            )
            experts = runner.routed_experts
            _load(runner, kind, source)
            experts.quant_method.process_weights_after_loading(experts)
        used = type(experts.quant_method.moe_kernel.fused_experts).__name__
        assert used == "MarlinExperts", f"vLLM chose {used}"
        context = import_module("vllm.forward_context").set_forward_context

        def forward(x: Tensor, factors: Tensor, ids: Tensor) -> Tensor:
            routes.append((factors, ids))
            with torch.inference_mode(), context(None, config, num_tokens=len(x)):
                result: Tensor = runner(x, x.new_zeros(len(x), len(EXPERTS)))
            return result.clone()

        names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        w13, w2, w13_scale, w2_scale = (getattr(experts, name).data for name in names)
        return Made((w13, w2, w13_scale, w2_scale), forward)

    def _started(self) -> Any:
        """The ``VllmConfig``, with process groups of one; made once."""
        if self._config is None:
            config = import_module("vllm.config")
            (self._folder / "config.json").write_text(json.dumps(HF_CONFIG))
            model = config.ModelConfig(
                model=str(self._folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
            )
            self._config = config.VllmConfig(
                model_config=model,
                device_config=config.DeviceConfig(device=DEVICE),
                kernel_config=config.KernelConfig(moe_backend="marlin"),
            )
            self._kept.enter_context(config.set_current_vllm_config(self._config))
            state = import_module("vllm.distributed.parallel_state")
            state.init_distributed_environment(1, 0, f"file://{self._folder}/group", 0, "nccl")
            state.initialize_model_parallel(backend="nccl")
            self._kept.callback(state.cleanup_dist_env_and_memory)
            import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cuda:0"))
        return self._config


def fused(
    weights: Sequence[Tensor],
    hidden: Tensor,
    factors: Tensor,
    ids: Tensor,
    activation: Callable[..., None] | None = None,
) -> Tensor:
    """The kernel of vLLM on converted weights: ``[tokens, H]``."""
    w13, w2, w13_scale, w2_scale = weights
    code = import_module("vllm.scalar_type").scalar_types.float4_e2m1f.id
    result: Tensor = import_module(_MARLIN).fused_marlin_moe(
        hidden_states=hidden,
        w1=w13,
        w2=w2,
        bias1=None,
        bias2=None,
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        topk_weights=factors,
        topk_ids=ids,
        quant_type_id=code,
        **({} if activation is None else {"activation_func": activation}),
    )
    return result


def read_back(weights: Sequence[Tensor], expert: int, width: int) -> tuple[Tensor, Tensor]:
    """The values of one expert's fused ``[2I, width]`` and down ``[width, I]`` matrices, by products of ones.

    ``width`` unit vectors go in, so the first product is the fused matrix, transposed; unit vectors in place of the
    activation make the second one down's. Each output is one product with 1 and zeros, which BF16 holds.
    """
    given: list[Tensor] = []

    def units(_activation: Any, out: Tensor, product: Tensor, *_: Any, **__: Any) -> None:
        assert out.shape[1] <= width, f"{width} tokens do not reach {out.shape[1]} columns of down"
        given.append(product.clone())
        out.copy_(torch.eye(len(out), out.shape[1], dtype=out.dtype, device=out.device))

    hidden = torch.eye(width, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.full((width, 1), expert, dtype=torch.int32, device=DEVICE)
    result = fused(weights, hidden, torch.ones(width, 1, device=DEVICE), ids, units)
    assert len(given) == 1, "the kernel never came to its activation"
    return given[0].T.cpu(), result[: given[0].shape[1] // 2].T.cpu()


def loaded_of(source: Source, kind: Kind, rows_to: int = 1, columns_to: int = 1) -> Loaded:
    """What a loader of the kind's order makes of the checkpoint."""
    shard = Shard(EXPERTS, 0, 1, kind.order)._replace(rows_to=rows_to, columns_to=columns_to)
    return due(source, kind.geometry, LAYER, shard)


def _quant_config(kind: Kind) -> Any:
    if kind.method == "compressed-tensors":
        released = kind.geometry.config()["text_config"]["quantization_config"]
        module = import_module(f"{_QUANTIZATION}.compressed_tensors.compressed_tensors")
        return module.CompressedTensorsConfig.from_config(released)
    module = import_module(f"{_QUANTIZATION}.mxfp4")
    return module.GptOssMxfp4Config() if kind.method == "gpt-oss" else module.Mxfp4Config()


def _load(runner: Any, kind: Kind, source: Source) -> None:
    """By vLLM's loader; gpt-oss's, which is a model's, is judged in test_mxfp4_loaders.py, and copied from here."""
    if kind.method == "gpt-oss":
        loaded = loaded_of(source, kind)
        for name, tensor in zip(
            ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), loaded, strict=True
        ):
            getattr(runner.routed_experts, name).data.copy_(tensor)
        return
    weight = "weight_packed" if kind.method == "compressed-tensors" else "weight"
    tensors = (
        (f"{expert}.{matrix}.{name}", tensor)
        for expert in EXPERTS
        for matrix in ROLES
        for name, tensor in zip((weight, "weight_scale"), source(LAYER, expert, matrix), strict=True)
    )
    assert len(list(runner.load_weights(tensors))) == 6 * len(EXPERTS)


def inputs(geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, route weights that are no BF16 numbers, and ids; expert 3 gets nothing."""
    token = torch.arange(TOKENS)[:, None]
    hidden = normal(hashed("mxfp4 rows", 0, token, torch.arange(geometry.latent))) * INPUT_SCALE
    factors = 0.25 + unit(hashed("mxfp4 factors", 0, token, torch.arange(geometry.top_k))) / 2
    ids = torch.tensor([0, 1, 2, 4])[(token + torch.tensor([0, 2])) % 4]
    return hidden.bfloat16(), factors.float(), ids.int()


class Verdict(NamedTuple):
    """Of all elements: how many, outside the bound, the worst in standard deviations, and the relative error."""

    elements: int
    wrong: int
    worst: float
    relative: float


def judged(made: Made, kind: Kind) -> Verdict:
    """The output of vLLM against the right checkpoint, decoded, in float64."""
    source = identity.source(kind.geometry)
    weights = [
        torch.stack([mxfp4.decode(*source(LAYER, expert, matrix), torch.float64) for expert in EXPERTS])
        for matrix in ("w1", "w3", "w2")
    ]
    hidden, factors, ids = inputs(kind.geometry)
    want, variance = dense_layer(
        hidden, ids.long(), factors, weights, None, Arithmetic(False, ROUNDS, kind.activation)
    )
    got = made.forward(hidden.to(DEVICE), factors.to(DEVICE), ids.to(DEVICE)).double().cpu()
    error = (got - want).nan_to_num(nan=torch.inf).abs()
    off = error / variance.sqrt()
    relative = float(error.norm() / want.norm())
    return Verdict(want.numel(), int((off > SIGMAS).sum()), float(off.max()), relative)


def swapped(source: Source) -> Source:
    return lambda layer, expert, matrix: source(layer, expert, {"w1": "w3", "w3": "w1"}.get(matrix, matrix))


def shifted(source: Source) -> Source:
    def scales_by_a_row(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
        packed, scale = source(layer, expert, matrix)
        return packed, scale.roll(1, 0)

    return scales_by_a_row


def nibbles(source: Source) -> Source:
    def odd_first(layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor]:
        packed, scale = source(layer, expert, matrix)
        return layouts.swap_nibbles(packed), scale

    return odd_first


def next_expert(source: Source) -> Source:
    return lambda layer, expert, matrix: source(layer, (expert + 1) % len(EXPERTS), matrix)


FAULTS = {"scales shifted": shifted, "gate and up swapped": swapped, "nibbles": nibbles, "expert": next_expert}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM that has Marlin's operators, or a skip that says what is missing."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    os.environ.update(Vllm().environment("cuda"))
    version = getattr(import_module("vllm"), "__version__", "of unknown version")
    try:
        ops = import_module("vllm._custom_ops")
        import_module(_MARLIN)
        ops.gptq_marlin_repack(torch.zeros(16, 128, dtype=torch.int32, device=DEVICE), 128, 128, 4)
        torch.cuda.synchronize()
    except Exception as error:  # a build for another torch or device may raise anything
        pytest.skip(f"vLLM {version} has no Marlin here: {type(error).__name__}: {error}")
    print(f"\nvLLM {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    with ExitStack() as kept:
        yield Engine(tmp_path_factory.mktemp("marlin"), kept)


@pytest.mark.parametrize("name", KINDS)
def test_the_output_is_that_of_the_decoded_weights(engine: Engine, name: str) -> None:
    kind = KINDS[name]
    found = judged(engine.make(kind, identity.source(kind.geometry)), kind)
    print(f"\n{name}: worst {found.worst:.2f} sigma, relative error {found.relative:.4f}")
    assert found.elements == TOKENS * kind.geometry.latent
    assert found.wrong == 0, str(found)
    assert found.worst > 1, "a bound that nothing comes near proves nothing"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_checkpoint_is_told_by_the_output(engine: Engine, name: str, fault: str) -> None:
    """The negative control, with the share of elements that it puts outside the bound."""
    kind = KINDS[name]
    found = judged(engine.make(kind, FAULTS[fault](identity.source(kind.geometry))), kind)
    print(f"\n{name}, {fault}: {found.wrong} of {found.elements} wrong, relative error {found.relative:.3g}")
    assert found.wrong > found.elements / 2, str(found)


@pytest.mark.parametrize("name", KINDS)
def test_each_converted_value_is_the_checkpoints(engine: Engine, name: str) -> None:
    """Bit for bit (but for the sign of zero), in the stated order of gate and up, with padding that is zero."""
    kind = KINDS[name]
    made = engine.make(kind, identity.source(kind.geometry))
    rows, columns = made.weights[1].shape[1] * 16, made.weights[0].shape[1] * 16  # Marlin's tiles of 16
    assert (rows, columns) == ((256, 512) if kind.geometry is UNEVEN else (384, 512))
    want = loaded_of(identity.source(kind.geometry), kind, rows, columns)
    for expert in EXPERTS:
        read = read_back(made.weights, expert, columns)
        for what, got, packed in zip(("gate and up", "down"), read, (want.fused, want.down), strict=True):
            value = mxfp4.decode(packed[0][expert], packed[1][expert], torch.bfloat16)
            assert got.shape == value.shape, f"{what} of expert {expert}: {got.shape}, expected {value.shape}"
            assert torch.equal(got, value), f"{what} of expert {expert}: {_first(got, value)}"


def test_reading_back_tells_a_shifted_scale(engine: Engine) -> None:
    """The negative control: another checkpoint's values do not equal the right one's, nor another order's."""
    kind = KINDS["kernel"]
    source = identity.source(PLAIN)
    wrong, want = engine.make(kind, shifted(source)), loaded_of(source, kind)
    got = read_back(wrong.weights, 2, PLAIN.latent)[0]
    assert not torch.equal(got, mxfp4.decode(want.w13[2], want.w13_scale[2], torch.bfloat16))
    moved = want.w13_scale[2].view(2, -1, want.w13_scale.shape[-1]).roll(1, 1).flatten(0, 1)
    assert torch.equal(got, mxfp4.decode(want.w13[2], moved, torch.bfloat16))
    gate, up = layouts.split(got, "interleaved")
    assert not torch.equal(torch.cat([gate, up]), got)


def _first(got: Tensor, want: Tensor) -> str:
    wrong = got != want
    row, column = (int(i) for i in wrong.nonzero()[0])
    same = sorted(set((want == got[row]).all(1).nonzero().flatten().tolist()))
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values differ, first at row {row}, column {column}: got "
        f"{float(got[row, column])}, expected {float(want[row, column])}; the row got is expected as row {same}"
    )


# DeepGEMM's layouts of scales.


def _deep_gemm(name: str) -> Any:
    """A function of the first build that has it."""
    said = []
    for module in deepgemm.MODULES:
        try:
            if found := getattr(import_module(module), name, None):
                return found
            said.append(f"{module} has no {name}")
        except Exception as error:  # a build for another torch may raise anything
            said.append(f"{module}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    pytest.skip("; ".join(said))


def _scales(rows: int, groups: int) -> Tensor:
    """``[3, rows, groups]`` of experts that differ."""
    each = [identity.weights(rows, groups * mxfp4.BLOCK, LAYER, expert, "w1")[1] for expert in range(3)]
    return torch.stack(each)


def _same_layout(got: Tensor, scale: Tensor) -> None:
    """Equal to ours in shape, strides along N and values; a scale moved by a row is not."""
    want = layouts.pack_ue8m0(scale)
    print(f"\n{tuple(scale.shape)}: {got.dtype} {tuple(got.shape)}, strides {got.stride()}")
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape, want.shape)
    assert got.stride()[-2:] == want.stride()[-2:], (got.stride(), want.stride())
    assert torch.equal(layouts.unpack_ue8m0(got.cpu(), scale.shape[-1]), scale), "bytes are elsewhere"
    assert not torch.equal(got.cpu(), layouts.pack_ue8m0(scale.roll(1, -2)))


SHAPES = ((384, 112), (100, 8), (130, 12), (100, 3), (3072, 112), (3584, 96))


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_deep_gemms_packed_scales_are_ours(rows: int, groups: int) -> None:
    """``get_mn_major_tma_aligned_packed_ue8m0_tensor``: float32 powers of two to four exponents an int32."""
    pack, scale = _deep_gemm("get_mn_major_tma_aligned_packed_ue8m0_tensor"), _scales(rows, groups)
    try:
        got = pack(mxfp4.scale_values(scale).to(DEVICE))
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"this build of DeepGEMM does not pack here: {' '.join(str(error).split())[:300]}")
    _same_layout(got, scale)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_deep_gemms_required_layout_is_ours(rows: int, groups: int) -> None:
    """``transform_sf_into_required_layout`` with blocks of 1 x 32: what engines call after loading."""
    transform, scale = _deep_gemm("transform_sf_into_required_layout"), _scales(rows, groups)
    major, minor = torch.cuda.get_device_capability()
    try:
        got = _required(transform, scale)
    except Exception as error:  # an extension's own class
        if major >= 10:
            raise
        pytest.skip(
            f"this build has it from SM100 on, here is SM{major}{minor}: {' '.join(str(error).split())[:200]}"
        )
    _same_layout(got, scale)


def _required(transform: Callable[..., Tensor], scale: Tensor) -> Tensor:
    experts, rows, groups = scale.shape
    return transform(
        mxfp4.scale_values(scale).to(DEVICE),
        mn=rows,
        k=groups * mxfp4.BLOCK,
        recipe=(1, mxfp4.BLOCK),
        num_groups=experts,
        disable_ue8m0_cast=False,
    )
