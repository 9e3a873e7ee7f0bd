"""Hugging Face transformers: the third opinion. One sequence at a time, the experts in a plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moonep_validate.served.answers import Who
from moonep_validate.served.speakers.speaker import Said


class Transformers:
    """A model of a folder.

    Args:
        model: folder with config.json and safetensors.
        dtype: ``float32`` or ``bfloat16``.
        options: keyword arguments of ``from_pretrained``, e.g. ``attn_implementation``.
    """

    def __init__(self, model: str, dtype: str = "float32", **options: Any) -> None:
        from transformers import AutoModelForCausalLM, __version__

        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True, **options
        ).eval()
        given = [f"{name}={value}" for name, value in sorted(options.items())]
        self._who = Who("transformers", __version__, model=model, dtype=dtype, arguments=given, vocab=self.vocab)

    @property
    def who(self) -> Who:
        """Name, version, model and type."""
        return self._who

    @property
    def vocab(self) -> int:
        """Of the model's configuration."""
        return int(self._model.config.vocab_size)

    @property
    def longest(self) -> int:
        """Of the model's configuration."""
        return int(self._model.config.max_position_embeddings)

    def say(self, asked: Sequence[Sequence[int]], counts: Sequence[int], top: int) -> Iterable[tuple[int, Said]]:
        """Greedy answers, each sequence by itself."""
        answers = (self._one(list(ids), count, top) for ids, count in zip(asked, counts, strict=True))
        return enumerate(answers)

    @torch.inference_mode()
    def _one(self, ids: list[int], count: int, top: int) -> Said:
        result = self._model(torch.tensor([ids]), use_cache=True)
        whole = _logprobs(result.logits[0])
        prompt = [None, *whole[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]
        tokens, chosen, tops, last = list[int](), list[float | None](), list[dict[int, float]](), whole[-1]
        for place in range(count):
            values, best = last.topk(top)
            tokens.append(int(best[0]))
            chosen.append(float(values[0]))
            tops.append(dict(zip(best.tolist(), values.tolist(), strict=True)))
            if place + 1 < count:
                result = self._model(
                    torch.tensor([[tokens[-1]]]), past_key_values=result.past_key_values, use_cache=True
                )
                last = _logprobs(result.logits[0])[-1]
        return Said(tokens, chosen, tops, prompt, "length")


def _logprobs(logits: Tensor) -> Tensor:
    """In float32, as serving engines do."""
    return torch.log_softmax(logits.float(), dim=-1)
