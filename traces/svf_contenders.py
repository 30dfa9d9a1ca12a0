"""Who competes in the SVF experiments, and what each knows of the outputs to come."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stream2llm_sdk.serving.length_prediction import LengthPrediction, LengthPredictor, RequestFeatures
from stream2llm_sdk.serving.length_training import LengthRecord, TrainedPredictor, evaluate, train

__all__ = ["PUBLISHED", "WITH_STREAMS", "Contender", "Predictors"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and its knowledge.

    Attributes:
        name: in tables.
        policy: as in `SCHEDULER_TYPE`.
        knows: of outputs nothing, a predicted bit, a predicted length, or the true length.
        streaming: whether open prompts are sent as they grow.
    """

    name: str
    policy: str
    knows: Literal["nothing", "bit", "length", "all"] = "nothing"
    streaming: bool = True


PUBLISHED = (
    Contender("FCFS", "DEFAULT_VLLM"),
    Contender("SJF", "SJF", "length"),
    Contender("Oracle-SJF", "SJF", "all"),
    Contender("SVF", "SVF", "length"),
    Contender("Oracle-SVF", "SVF", "all"),
    Contender("1-bit SVF", "SVF_1BIT", "bit"),
)
WITH_STREAMS = (
    Contender("vLLM's order, not streamed", "DEFAULT_VLLM", streaming=False),
    Contender("vLLM's order", "DEFAULT_VLLM"),
    Contender("FCFS", "FCFS"),
    Contender("LCAS", "LCAS"),
    Contender("SRPF", "SRPF"),
    Contender("ADAPTIVE", "ADAPTIVE"),
    Contender("SJF", "SJF", "length"),
    Contender("SVF", "SVF", "length"),
    Contender("Oracle-SVF", "SVF", "all"),
    Contender("1-bit SVF", "SVF_1BIT", "bit"),
)


class _Knowing(LengthPredictor):
    """Knows the length of every request of `with_known_lengths`."""

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        assert features.max_tokens is not None
        return LengthPrediction(features.max_tokens - 1.0, False)


class _OneBit(LengthPredictor):
    """What is left of a predictor if only its bit is told: each class's mean over the training requests."""

    def __init__(self, predictor: LengthPredictor, records: Sequence[LengthRecord]) -> None:
        self._predictor = predictor
        lengths: dict[bool, list[int]] = {False: [], True: []}
        for record in records:
            lengths[predictor.predict(record.features).is_long].append(record.num_output_tokens)
        self._means = {is_long: statistics.fmean(of_class or [1]) for is_long, of_class in lengths.items()}

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        is_long = self._predictor.predict(features).is_long
        return LengthPrediction(self._means[is_long], is_long)


@dataclass(frozen=True, slots=True)
class Predictors:
    """What was learned of a load.

    Attributes:
        length: the trained predictor.
        bit: its bit alone.
        accuracy: how often that bit is right on requests that it was not trained on.
    """

    length: TrainedPredictor
    bit: LengthPredictor
    accuracy: float

    @classmethod
    def trained(cls, records: Sequence[LengthRecord], held_out: Sequence[LengthRecord]) -> Predictors:
        """Trains on some records, and measures on others."""
        predictor = train(records)
        return cls(predictor, _OneBit(predictor, records), evaluate(predictor, held_out).accuracy)

    def of(self, contender: Contender) -> LengthPredictor | None:
        """What a contender's scheduler asks; None for its default, which it then does not use."""
        choices = {"nothing": None, "bit": self.bit, "length": self.length, "all": _Knowing()}
        return choices[contender.knows]
