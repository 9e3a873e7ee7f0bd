"""vLLM in process: its own ``LLM``, prompts as token ids, eager."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from moonep_validate.served.answers import Who
from moonep_validate.served.speakers.speaker import Said

#: One process, no call home, no look-up of models. What the user has set stays.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Vllm:
    """A model in one process.

    Args:
        model: folder or name.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        options: keyword arguments of ``vllm.LLM``.
    """

    def __init__(self, model: str, dtype: str = "auto", **options: Any) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, __version__

        given = {"skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": False, **options}
        self._llm = LLM(model=model, dtype=dtype, **given)
        config = self._llm.llm_engine.vllm_config
        self._longest = int(config.model_config.max_model_len)
        self._vocab = int(config.model_config.get_vocab_size())
        parallel = config.parallel_config
        self._who = Who(
            "vllm",
            __version__,
            model=model,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            backend=str(parallel.all2all_backend) if getattr(parallel, "use_all2all", False) else "",
            arguments=[f"{name}={value}" for name, value in sorted(options.items())],
            vocab=self._vocab,
        )

    @property
    def who(self) -> Who:
        """Name, version, model, type and the backend that the engine really uses."""
        return self._who

    @property
    def vocab(self) -> int:
        """Of the engine's configuration."""
        return self._vocab

    @property
    def longest(self) -> int:
        """Of the engine's configuration."""
        return self._longest

    def say(self, asked: Sequence[Sequence[int]], counts: Sequence[int], top: int) -> Iterable[tuple[int, Said]]:
        """Greedy answers; the engine makes its batches."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        common = {
            "temperature": 0.0,
            "logprobs": top,
            "prompt_logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        }
        params = [SamplingParams(max_tokens=count, **common) for count in counts]
        prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in asked]
        done = self._llm.generate(prompts, params, use_tqdm=False)
        return enumerate(_said(list(ids), one) for ids, one in zip(asked, done, strict=True))


def _said(ids: list[int], done: Any) -> Said:
    out = done.outputs[0]
    tops = [{token: entry.logprob for token, entry in place.items()} for place in out.logprobs]
    prompt = [
        None if place is None else place[token].logprob
        for token, place in zip(ids, done.prompt_logprobs or [None] * len(ids), strict=True)
    ]
    tokens = list(out.token_ids)
    chosen = [place[token] for token, place in zip(tokens, tops, strict=True)]
    return Said(tokens, chosen, tops, prompt, str(out.finish_reason))
