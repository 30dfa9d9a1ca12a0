"""A prompt and what each update did to it: which tokens are new, which stay, and whose KV becomes void."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.context import ContextUpdate
from stream2llm_sdk.growing_prompt import Prompt, PromptChange
from stream2llm_sdk.placement import Placement

if TYPE_CHECKING:
    from stream2llm_sdk.display.markup import Shown
    from stream2llm_sdk.tokenizer import Tokenizer

__all__ = ["PromptHistory", "PromptStep"]


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A prompt after an update.

    Attributes:
        name: 'head', 'update 1' and so on, or 'question'.
        ids: its token ids: the head and the context so far; in the end also the question.
        written_by: for each of them, the number of the step since which it stands there with the same tokens before
            it: its KV, computed then, is good until now.
        lcp: leading tokens in common with the step before.
        placements: where the chunks stand.
        num_before: tokens of the step before.
    """

    name: str
    ids: tuple[int, ...]
    written_by: tuple[int, ...]
    lcp: int
    placements: tuple[Placement, ...]
    num_before: int

    @property
    def num_invalidated(self) -> int:
        """Tokens of the step before whose KV became void."""
        return self.num_before - self.lcp

    @property
    def num_new(self) -> int:
        """Tokens that are to be prefilled now."""
        return len(self.ids) - self.lcp


class PromptHistory(Sequence[PromptStep]):
    """Watches a prompt while its context grows. The first step is the head, which the engine prefills at once.

    Args:
        prompt: without context so far; give all its updates to `apply` here.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._steps: list[PromptStep] = []
        self._add("head", prompt.ids)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        return self._steps[index]

    def apply(self, update: ContextUpdate) -> PromptChange:
        """Gives the prompt an update and notes what it did. Returns what the engine is sent."""
        change = self.prompt.apply(update)
        self._add(f"update {len(self._steps)}", self.prompt.ids)
        return change

    def complete(self) -> list[int]:
        """Puts the question behind the context; returns the whole prompt's token ids."""
        ids = self.prompt.final_ids
        self._add("question", ids)
        return ids

    @property
    def num_prefilled(self) -> int:
        """Tokens run through the model if each step is prefilled before the next comes."""
        return sum(step.num_new for step in self._steps)

    @property
    def num_invalidated(self) -> int:
        """Tokens that were prefilled in vain."""
        return sum(step.num_invalidated for step in self._steps)

    def tokens(self, tokenizer: Tokenizer) -> Shown:
        """The prompt token by token, for a notebook: what stays, what is new, and what is taken out at each step."""
        from stream2llm_sdk.display.token_view import tokens_shown

        return tokens_shown(self, tokenizer)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.prompt_view import history_html

        return history_html(self)

    def _add(self, name: str, ids: Sequence[int]) -> None:
        before = self._steps[-1] if self._steps else None
        old_ids = before.ids if before is not None else ()
        different = (index for index, (old, new) in enumerate(zip(old_ids, ids, strict=False)) if old != new)
        lcp = next(different, min(len(old_ids), len(ids)))
        kept = before.written_by[:lcp] if before is not None else ()
        written_by = (*kept, *[len(self._steps)] * (len(ids) - lcp))
        self._steps.append(PromptStep(name, tuple(ids), written_by, lcp, self.prompt.placements, len(old_ids)))
