"""Plain transformers generation, the truth that the worker's greedy answers are compared with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# Two logits closer than this may swap places by the order in which floats are added.
TIE = 1e-3


class ReferenceModel:
    """A model as transformers runs it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        ).eval()

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens, the end-of-sequence token included."""
        tokens = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                repetition_penalty=1.0,
            )
        return output[0, len(prompt) :].tolist()

    def greedy_after(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The greedy token at each place of an answer, given what stands before it, in one pass.

        An answer that equals this is the greedy one, by induction over its tokens.
        """
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return logits.argmax(dim=-1).tolist()

    def explain_difference(
        self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
    ) -> str | None:
        """Why two answers differ; None when they are equal or part at a tie of logits."""
        if list(ours) == list(theirs):
            return None
        shared = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if shared is None:
            return f"{len(ours)} tokens against {len(theirs)}"
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *theirs[:shared]]])).logits[0, -1]
        gap = abs(float(logits[ours[shared]] - logits[theirs[shared]]))
        return (
            None if gap < TIE else f"token {shared}: {ours[shared]} against {theirs[shared]}, gap {gap:.4f}"
        )
