"""What is expected of each request: when an open prompt will be complete, how long it and the output will be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.forecast import Forecast, StreamForecaster, StreamKey
from stream2llm_sdk.serving.length_prediction import (
    BatchedPrediction,
    ClassMeans,
    LengthPrediction,
    LengthPredictor,
    MaxTokensPredictor,
    QuantilePredictor,
    RequestFeatures,
    corrected,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt

__all__ = ["Outlook", "make_predictor"]


def make_predictor(name: str) -> LengthPredictor:
    """`max_tokens`, `quantile`, or the file of a trained predictor.

    Raises:
        ConfigurationError: it is none of these.
    """
    if name == "max_tokens":
        return MaxTokensPredictor()
    if name == "quantile":
        return QuantilePredictor()
    if name.endswith(".json"):
        from stream2llm_sdk.serving.length_training import TrainedPredictor

        return TrainedPredictor.load(name)
    raise ConfigurationError(f"length_predictor={name!r}: choose 'max_tokens', 'quantile' or a .json file")


class Outlook:
    """Learns from what happens to requests, and tells what it expects of those that are there.

    A predictor that is named by its file runs in a thread, off the step's path, and until it has answered the request's
    `max_tokens` stands; the others, and one that is given itself, answer at once.

    Args:
        predictor: its name or file, or itself.
        max_model_len: tokens that vLLM's own streaming-input sessions, whose prompts grow unseen, may come to.
    """

    def __init__(self, predictor: str | LengthPredictor = "quantile", *, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.streams = StreamForecaster()
        self.class_means = ClassMeans()
        self._batched: BatchedPrediction | None = None
        self._reads_questions = True
        if isinstance(predictor, str):
            self._predictor = make_predictor(predictor)
            self._reads_questions = predictor.endswith(".json")
            self._batched = BatchedPrediction(self._predictor) if self._reads_questions else None
        else:
            self._predictor = predictor
        self._features: dict[str, RequestFeatures] = {}
        self._most_tokens: dict[str, int] = {}
        self._total_most_tokens = 0
        self._predictions: Mapping[str, LengthPrediction] | dict[str, LengthPrediction] = {}

    def close(self) -> None:
        """Ends the predictor's thread."""
        if self._batched is not None:
            self._batched.close()

    @property
    def most_tokens(self) -> int:
        """Prompt and longest output of all requests whose prompt is complete: they never hold more."""
        return self._total_most_tokens

    # ---- what happens -------------------------------------------------------------------------------------------

    def added(self, request: Request, prompt: StreamingPrompt | None, now_s: float) -> None:
        self._predict(request, prompt)
        if prompt is None or not prompt.is_open:
            self._count(request)
        else:
            key = StreamKey(prompt.tag, prompt.tenant)
            self.streams.opened(request.request_id, key, len(prompt.token_ids), now_s)

    def prompt_changed(self, request: Request, num_tokens: int, final: bool, now_s: float) -> None:
        if final:
            self.streams.completed(request.request_id, num_tokens, now_s)
        else:
            self.streams.chunk(request.request_id, num_tokens, now_s)

    def completed(self, request: Request, prompt: StreamingPrompt) -> None:
        """The prompt is whole: the question in its tail can be read."""
        self._predict(request, prompt)
        self._count(request)

    def ended(self, request: Request, *, finished: bool) -> None:
        request_id = request.request_id
        self.streams.ended(request_id)
        self._total_most_tokens -= self._most_tokens.pop(request_id, 0)
        features = self._features.pop(request_id, None)
        if features is None:
            return
        prediction = self.prediction(request_id)
        if finished and prediction is not None:
            self.class_means.observe(prediction.is_long, request.num_output_tokens)
        if self._batched is not None:
            if finished:
                self._batched.finished(request_id, request.num_output_tokens)
            else:
                self._batched.forget(request_id)
            return
        if finished:
            self._predictor.observe(features, request.num_output_tokens)
        if isinstance(self._predictions, dict):
            self._predictions.pop(request_id, None)

    def _count(self, request: Request) -> None:
        most: int = self._max_model_len if request.resumable else request.num_prompt_tokens + request.max_tokens
        self._total_most_tokens += most - self._most_tokens.pop(request.request_id, 0)
        self._most_tokens[request.request_id] = most

    def _predict(self, request: Request, prompt: StreamingPrompt | None) -> None:
        features = RequestFeatures(
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            tag="" if prompt is None else prompt.tag,
            tenant="" if prompt is None else prompt.tenant,
            question_token_ids=tuple((request.prompt_token_ids or ())[-64:]) if self._reads_questions else (),
        )
        self._features[request.request_id] = features
        if self._batched is not None:
            self._batched.add(request.request_id, features)
        elif isinstance(self._predictions, dict):
            self._predictions[request.request_id] = self._predictor.predict(features)

    # ---- what is expected ---------------------------------------------------------------------------------------

    def refresh(self, now_s: float) -> Mapping[str, Forecast]:
        """To be called once a step: picks predictions up, and gives the forecasts of the open streams. One that did
        not change is the same object as before."""
        self.pick_up()
        return self.streams.forecasts(now_s)

    def pick_up(self) -> None:
        """Takes what a predictor in a thread has answered meanwhile."""
        if self._batched is not None:
            self._predictions = self._batched.pick_up()

    def prediction(self, request_id: str) -> LengthPrediction | None:
        """What was predicted of the output, before any of it was there."""
        return self._predictions.get(request_id)

    def output(self, request: Request) -> LengthPrediction:
        """What is expected of the output, in the light of what there is of it."""
        max_tokens: Any = request.max_tokens
        prediction = self._predictions.get(request.request_id)
        if prediction is None:
            prediction = LengthPrediction(float(max_tokens or 1), False)
        return corrected(prediction, request.num_output_tokens, max_tokens)
