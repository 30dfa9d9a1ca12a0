"""Random lives of streaming prompts, and what a test believes their prompts to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stream2llm_sdk.testing.core_driver import CoreDriver

SCHEDULER = "stream2llm_sdk.serving.scheduler.Stream2LLMScheduler"
FLAGS = {"is_streaming_prompt": True, "is_streaming_prompt_finished": False, "is_prompt_update": True}


def tokens(rng: random.Random, count: int) -> list[int]:
    """Ordinary token ids of the tiny models."""
    return [rng.randrange(3, 500) for _ in range(count)]


class Prompts:
    """Sends prompts and their changes to an engine core, and keeps what each should be by now."""

    def __init__(self, driver: CoreDriver) -> None:
        self.driver = driver
        self.now: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.open: list[str] = []
        self.aborted: set[str] = set()

    def open_stream(self, request_id: str, ids: Sequence[int], *, max_tokens: int = 8, **flags: Any) -> None:
        self._add(request_id, ids, max_tokens, {"stream2llm": {**FLAGS, **flags}})
        self.open.append(request_id)

    def add_plain(self, request_id: str, ids: Sequence[int], *, max_tokens: int = 8) -> None:
        self._add(request_id, ids, max_tokens, None)

    def _add(self, request_id: str, ids: Sequence[int], max_tokens: int, extra_args: dict[str, Any] | None) -> None:
        self.now[request_id] = list(ids)
        self.max_tokens[request_id] = max_tokens
        self.driver.add(request_id, list(ids), max_tokens=max_tokens, extra_args=extra_args)

    def append(self, request_id: str, ids: Sequence[int], *, final: bool = False) -> dict[str, Any]:
        self.now[request_id] = self.now[request_id] + list(ids)
        return self._update(request_id, "append", ids, final)

    def replace(self, request_id: str, ids: Sequence[int], *, final: bool = False) -> dict[str, Any]:
        self.now[request_id] = list(ids)
        return self._update(request_id, "replace", ids, final)

    def finish(self, request_id: str) -> dict[str, Any]:
        return self.append(request_id, [], final=True)

    def abort(self, request_id: str) -> None:
        self.driver.abort(request_id)
        self.aborted.add(request_id)
        if request_id in self.open:
            self.open.remove(request_id)

    def _update(self, request_id: str, kind: str, ids: Sequence[int], final: bool) -> dict[str, Any]:
        packed = np.array(ids, dtype=np.int32).tobytes()
        sent_s = self.driver.scheduler.now_s()
        answer: dict[str, Any] = self.driver.call("update", [request_id, kind, packed, final, sent_s])
        assert "error" not in answer, (request_id, answer)
        if final:
            self.open.remove(request_id)
        return answer

    @property
    def to_answer(self) -> list[str]:
        """Requests that must end with a full answer."""
        return [request_id for request_id in self.now if request_id not in self.aborted]


def run_script(
    prompts: Prompts,
    rng: random.Random,
    tag: str,
    *,
    max_prompt: int = 400,
    max_piece: int = 120,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """A few streams with a common beginning, changed at random while the engine steps, beside plain requests."""
    driver = prompts.driver
    shared = tokens(rng, rng.randrange(1, max_prompt // 2))

    def steps(count: int) -> None:
        for _ in range(count):
            driver.step()
            after_step()

    for index in range(rng.randrange(2, 6)):
        beginning = shared[: rng.randrange(1, len(shared) + 1)] + tokens(rng, rng.randrange(0, max_piece))
        prompts.open_stream(f"{tag}-{index}", beginning, max_tokens=rng.randrange(1, 12))
        steps(rng.randrange(0, 3))
    mine = list(prompts.open)
    number = 0
    while any(request_id in prompts.open for request_id in mine):
        steps(rng.randrange(0, 4))
        if rng.random() < 0.15:
            number += 1
            prompts.add_plain(f"{tag}-plain-{number}", shared + tokens(rng, rng.randrange(1, max_piece)))
        _change(prompts, rng, rng.choice([r for r in mine if r in prompts.open]), max_prompt, max_piece)
        after_step()
    driver.run_until_idle(20_000, after_step=after_step)


def _change(prompts: Prompts, rng: random.Random, request_id: str, max_prompt: int, max_piece: int) -> None:
    now = prompts.now[request_id]
    final = rng.random() < 0.2 or len(now) > max_prompt - max_piece
    choice = rng.random()
    if choice < 0.4:
        prompts.append(request_id, tokens(rng, rng.randrange(0, max_piece)), final=final)
    elif choice < 0.85:
        prompts.replace(request_id, _replacement(rng, now, max_piece), final=final)
    elif choice < 0.97:
        prompts.finish(request_id)
    else:
        prompts.abort(request_id)


def _replacement(rng: random.Random, now: list[int], max_piece: int) -> list[int]:
    """LCP 0, at a block's edge, inside a block, a shorter prompt, or the same one."""
    kind = rng.randrange(5)
    if kind == 0:
        return tokens(rng, rng.randrange(1, max_piece))
    if kind == 1:
        keep = len(now) // 16 * 16
    elif kind == 2:
        keep = rng.randrange(0, len(now) + 1)
    elif kind == 3:
        return now[: rng.randrange(1, len(now) + 1)]
    else:
        return list(now)
    return now[:keep] + tokens(rng, rng.randrange(1, max_piece))
