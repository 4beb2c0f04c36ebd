"""What transformers' own `generate` says, as the yardstick of the whole cluster."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """Greedy float32 generation in one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _model(self) -> torch.nn.Module:
        torch.set_num_threads(1)
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    def tokens(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The next `max_tokens` tokens, end tokens ignored."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        return token_ids
