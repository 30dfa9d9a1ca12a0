"""A small trained predictor of output lengths: linear in hashed prompt features, stored as plain numbers.

Training needs scikit-learn (the extra `predict`); loading and predicting do not. A stored predictor is a JSON file, so
that loading one runs no code.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.files import read_json_object
from stream2llm_sdk.serving.length_prediction import LengthPrediction, LengthPredictor, RequestFeatures
from stream2llm_sdk.trail import EventType

__all__ = ["EvaluationReport", "LengthRecord", "TrainedPredictor", "evaluate", "read_trails", "split", "train"]

Vector = NDArray[np.float64]

_FORMAT = "stream2llm-length-predictor"
_VERSION = 1
_MIN_RECORDS = 50
_MAX_QUESTION_TOKENS = 64
# Columns: numbers, then one of these for the tag, one for the tenant, and the question's bag of tokens.
_NUM_NUMBERS = 4
_NUM_NAME_BUCKETS = 32
_NUM_TOKEN_BUCKETS = 512
_TOKENS_FROM = _NUM_NUMBERS + 2 * _NUM_NAME_BUCKETS
_NUM_COLUMNS = _TOKENS_FROM + _NUM_TOKEN_BUCKETS
# Brings logarithms of token counts to the size of the other columns.
_LOG_SCALE = 0.125
# How strongly to shrink the coefficients is chosen by cross-validation.
_RIDGE_ALPHAS = (1.0, 10.0, 100.0)
_LOGISTIC_CS = (0.03, 0.1, 0.3, 1.0)
_NUM_FOLDS = 3


@dataclass(frozen=True, slots=True)
class LengthRecord:
    """One request that ended of itself, and how long its output was."""

    features: RequestFeatures
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """How good a predictor is on records.

    Attributes:
        num_records: records it was tried on.
        accuracy: share of right short/long bits.
        always_short_accuracy: the same for a predictor that calls every request short.
        mean_absolute_error: of the length, in tokens.
        constant_mean_absolute_error: the same for a predictor that always says the records' median.
    """

    num_records: int
    accuracy: float
    always_short_accuracy: float
    mean_absolute_error: float
    constant_mean_absolute_error: float

    @property
    def accuracy_over_always_short(self) -> float:
        return self.accuracy - self.always_short_accuracy


class TrainedPredictor(LengthPredictor):
    """Two linear models over the same features: one of the log odds of being long, one of the length's logarithm.

    Args:
        bit: coefficients by column, the intercept last.
        length: the same for log(1 + output tokens).
        long_from: from how many tokens a request was long in training.

    Raises:
        ConfigurationError: coefficients are missing or not finite.
    """

    def __init__(self, bit: Sequence[float], length: Sequence[float], long_from: int) -> None:
        self._bit = _coefficients("bit", bit)
        self._length = _coefficients("length", length)
        self.long_from = long_from

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        numbers, columns = _numbers(features), _columns(features)
        score, log_length = self._bit[-1], self._length[-1]
        for column, number in enumerate(numbers):
            score += self._bit[column] * number
            log_length += self._length[column] * number
        for column in columns:
            score += self._bit[column]
            log_length += self._length[column]
        num_tokens = math.expm1(min(max(log_length, 0.0), 20.0))
        limit = math.inf if features.max_tokens is None else features.max_tokens
        return LengthPrediction(min(num_tokens, limit), score > 0 and limit >= self.long_from)

    def save(self, path: str | Path) -> None:
        """Writes the coefficients as JSON."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "long_from": self.long_from,
            "bit": self._bit,
            "length": self._length,
        }
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TrainedPredictor:
        """Reads what `save` wrote.

        Raises:
            ConfigurationError: the file holds something else, or is of another version.
        """
        content = read_json_object(path, "a length predictor")
        if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise ConfigurationError(f"{path} is not a length predictor of version {_VERSION}: train and save it again")
        long_from = content.get("long_from")
        if not isinstance(long_from, int):
            raise ConfigurationError(f"{path}: long_from must be a whole number, not {long_from!r}")
        return cls(content.get("bit", ()), content.get("length", ()), long_from)


def train(records: Iterable[LengthRecord], *, long_from: int | None = None) -> TrainedPredictor:
    """Fits the two models.

    Args:
        records: at least 50. Hold some back for `evaluate` (`split`).
        long_from: from how many output tokens a request is long; by default longer than the records' mean, which
            makes long the rarer class where a few outputs are much longer than most.

    Raises:
        ConfigurationError: there are too few records.
        MissingExtraError: scikit-learn is not installed.
    """
    records = list(records)
    if len(records) < _MIN_RECORDS:
        raise ConfigurationError(
            f"{len(records)} records are too few to train a length predictor: record at least {_MIN_RECORDS} requests"
        )
    try:
        from scipy.sparse import csr_matrix
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.model_selection import GridSearchCV
    except ModuleNotFoundError as error:
        raise MissingExtraError("scikit-learn", "predict") from error
    lengths = np.array([record.num_output_tokens for record in records], dtype=np.float64)
    if long_from is None:
        long_from = math.floor(lengths.mean()) + 1
    # Sparse, for speed, and to leave the cores to others: dense products would take all of them.
    matrix, is_long = csr_matrix(_matrix([record.features for record in records])), lengths >= long_from

    def fitted(model: Any, shrinkage: dict[str, tuple[float, ...]], target: Any) -> list[float]:
        best = GridSearchCV(model, shrinkage, cv=_NUM_FOLDS).fit(matrix, target).best_estimator_
        return [*best.coef_.ravel().tolist(), float(np.ravel(best.intercept_)[0])]

    length = fitted(Ridge(), {"alpha": _RIDGE_ALPHAS}, np.log1p(lengths))
    if min(is_long.sum(), (~is_long).sum()) < _NUM_FOLDS:
        bit = [0.0] * _NUM_COLUMNS + [1.0 if is_long.mean() > 0.5 else -1.0]
    else:
        bit = fitted(LogisticRegression(max_iter=1_000), {"C": _LOGISTIC_CS}, is_long)
    return TrainedPredictor(bit, length, long_from)


def evaluate(
    predictor: LengthPredictor, records: Iterable[LengthRecord], *, long_from: int | None = None
) -> EvaluationReport:
    """Compares predictions with records that the predictor has not seen.

    Args:
        predictor: any predictor.
        records: at least one.
        long_from: from how many output tokens a request is long; a trained predictor knows its own.

    Raises:
        ConfigurationError: there are no records, or no boundary between short and long.
    """
    records = list(records)
    if long_from is None and isinstance(predictor, TrainedPredictor):
        long_from = predictor.long_from
    if not records or long_from is None:
        raise ConfigurationError("an evaluation needs records, and `long_from` unless the predictor was trained")
    predictions = predictor.predict_batch([record.features for record in records])
    lengths = [record.num_output_tokens for record in records]
    median = statistics.median(lengths)
    return EvaluationReport(
        num_records=len(records),
        accuracy=statistics.fmean(
            (length >= long_from) == prediction.is_long for length, prediction in zip(lengths, predictions, strict=True)
        ),
        always_short_accuracy=statistics.fmean(length < long_from for length in lengths),
        mean_absolute_error=statistics.fmean(
            abs(length - prediction.num_tokens) for length, prediction in zip(lengths, predictions, strict=True)
        ),
        constant_mean_absolute_error=statistics.fmean(abs(length - median) for length in lengths),
    )


def split(
    records: Iterable[LengthRecord], *, held_out: float = 0.25, seed: int = 0
) -> tuple[list[LengthRecord], list[LengthRecord]]:
    """Records to train on, and records to hold back, drawn at random."""
    if not 0 < held_out < 1:
        raise ConfigurationError(f"the share to hold back lies between 0 and 1, {held_out!r} does not")
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    num_held_out = max(1, round(held_out * len(shuffled)))
    return shuffled[num_held_out:], shuffled[:num_held_out]


def read_trails(paths: Iterable[str | Path]) -> list[LengthRecord]:
    """The records of trails written by `EventTrail.to_jsonl`, one or many in a file.

    Each comes from a FINISHED event whose data has `num_prompt_tokens` and `num_output_tokens`, and where known
    `max_tokens`, `tag`, `tenant` and `question_token_ids`. Aborted requests and events without the two numbers are
    passed over.

    Raises:
        ConfigurationError: a line is not an event.
    """
    records = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if row["type"] == EventType.FINISHED and (record := _record(row["data"])) is not None:
                        records.append(record)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ConfigurationError(f"{path}, line {number}, is not an event of a trail: {error!r}") from None
    return records


def _record(data: Mapping[str, Any]) -> LengthRecord | None:
    num_prompt_tokens, num_output_tokens = data.get("num_prompt_tokens"), data.get("num_output_tokens")
    if num_prompt_tokens is None or num_output_tokens is None:
        return None
    max_tokens = data.get("max_tokens")
    features = RequestFeatures(
        num_prompt_tokens=int(num_prompt_tokens),
        max_tokens=None if max_tokens is None else int(max_tokens),
        tag=str(data.get("tag") or ""),
        tenant=str(data.get("tenant") or ""),
        question_token_ids=tuple(map(int, data.get("question_token_ids") or ())),
    )
    return LengthRecord(features, int(num_output_tokens))


def _matrix(batch: Sequence[RequestFeatures]) -> Vector:
    """Features, `[requests, columns]`."""
    matrix = np.zeros((len(batch), _NUM_COLUMNS))
    for row, features in zip(matrix, batch, strict=True):
        row[:_NUM_NUMBERS] = _numbers(features)
        row[list(_columns(features))] = 1.0
    return matrix


def _numbers(features: RequestFeatures) -> tuple[float, float, float, float]:
    """The first columns."""
    limit = features.max_tokens
    return (
        _LOG_SCALE * math.log1p(max(0, features.num_prompt_tokens)),
        _LOG_SCALE * math.log1p(min(len(features.question_token_ids), _MAX_QUESTION_TOKENS)),
        0.0 if limit is None else 1.0,
        0.0 if limit is None else _LOG_SCALE * math.log1p(max(0, limit)),
    )


def _columns(features: RequestFeatures) -> set[int]:
    """The other columns that are 1: tag, tenant, and the last 64 ids of the question."""
    # Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3): neighbouring ids part.
    columns = {
        _TOKENS_FROM + ((token_id * 2_654_435_769 & 0xFFFF_FFFF) * _NUM_TOKEN_BUCKETS >> 32)
        for token_id in features.question_token_ids[-_MAX_QUESTION_TOKENS:]
    }
    columns.add(_NUM_NUMBERS + _bucket(features.tag))
    columns.add(_NUM_NUMBERS + _NUM_NAME_BUCKETS + _bucket(features.tenant))
    return columns


def _bucket(name: str) -> int:
    return zlib.crc32(name.encode()) % _NUM_NAME_BUCKETS


def _coefficients(name: str, values: Sequence[float]) -> list[float]:
    try:
        coefficients = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ConfigurationError(f"the coefficients {name!r} of a length predictor are not numbers") from None
    if len(coefficients) != _NUM_COLUMNS + 1 or not all(map(math.isfinite, coefficients)):
        raise ConfigurationError(
            f"a length predictor needs {_NUM_COLUMNS + 1} finite coefficients {name!r}, these are "
            f"{len(coefficients)}: train it again"
        )
    return coefficients
