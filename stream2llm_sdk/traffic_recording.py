"""Where and how an application's traffic is recorded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["KeptTexts", "TrafficRecording"]

_KEY_BYTES = (16, 64)


class KeptTexts(StrEnum):
    """What a recording keeps of texts: of questions, chunks, sources, titles, metadata, tenants and failures.

    Attributes:
        KEEP: all of it.
        HASH: keyed digests of questions, chunks and tenants, and token counts. Equal texts have equal digests.
        COUNT: token counts, and digests of tenants. Chunks are numbered within their trace: which of them are in
            another trace as well is not to be seen, and nor is what a prefix cache would find.
    """

    KEEP = "keep"
    HASH = "hash"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class TrafficRecording:
    """Where and how `StreamingRAG(record=…)` records its traffic.

    Every question becomes a trace: when it came, what of its retrieval reached the prompt and when, how many tokens
    each chunk has there, the question's and the answer's number of tokens, the tenant, and what failed. What the
    prompt's budgets left out is left out here, too, and a text that was cut ends about where the prompt's does, so
    that a replay makes the load that there was. A context that only grows is recorded as `Append`; any other, such as
    that of several retrievers in both modes, as the contexts that stood in the prompt one after another, each a
    `Replace` in the prompt's order.

    Answers are not recorded, only their lengths. A question that was cancelled, failed or ran into its deadline has
    what came until then, and the reason among its failures ('answer': 'cancelled', 'retrieval': 'ended early:
    deadline'). One that failed before it had a prompt is not there.

    `read_traces(folder)` and every command that takes traces read the folder, also while it is written and after a
    crash. Any number of processes may record into one folder. It may be moved away at any time; recording goes on when
    there is a folder of that name again. Its files are readable by their owner alone.

    Attributes:
        folder: made if need be; a folder that holds other things is refused.
        texts: 'keep'; 'hash': keyed digests in place of questions, chunks, sources and tenants, and token counts, where
            equal texts stay equal; or 'count': token counts alone, where nothing tells which texts of two questions are
            equal. In the last two no titles, metadata, scores and reasons are kept. Names of retrievers always are.
        sample: the share of the questions that is recorded, drawn for each; above 0, at most 1.
        max_bytes: what the folder may hold, over all processes: when it is reached, no more is written until something
            is taken away. None for no bound.
        max_queued: traces that may wait to be written; those that come while as many wait are dropped and counted.
        key: of the digests, 16 to 64 bytes; left out, random and known to this process alone. Give one, and keep it
            outside the folder, for digests that are equal over processes and restarts.

    Raises:
        ConfigurationError: a value cannot work.
    """

    folder: str | os.PathLike[str]
    texts: KeptTexts | str = KeptTexts.KEEP
    sample: float = 1.0
    max_bytes: int | None = 1 << 30
    max_queued: int = 1024
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ConfigurationError(f"record={self.folder!r:.80}: name a folder, or give TrafficRecording(folder, …)")
        if self.texts not in list(KeptTexts):
            raise ConfigurationError(f"texts={self.texts!r:.80}: choose one of {', '.join(KeptTexts)}")
        object.__setattr__(self, "texts", KeptTexts(self.texts))
        sample = self.sample
        if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0 < sample <= 1:
            raise ConfigurationError(f"sample={sample!r:.80}: give a share of the questions, above 0 and at most 1")
        for name in ("max_bytes", "max_queued"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_count and not (name == "max_bytes" and value is None):
                raise ConfigurationError(f"{name}={value!r:.80}: give a whole number, at least 1")
        if self.key is not None and not self._is_key(self.key):
            raise ConfigurationError("key must be 16 to 64 bytes, such as secrets.token_bytes(32)")

    @staticmethod
    def _is_key(key: object) -> bool:
        return isinstance(key, bytes) and _KEY_BYTES[0] <= len(key) <= _KEY_BYTES[1]
