"""When questions come."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals import Arrivals, read_arrivals


@pytest.mark.parametrize("variation", [1.0, 2.5, 0.3])
def test_random_waits_have_their_rate_and_variation(variation: float) -> None:
    waits_s = np.diff(Arrivals(rate_per_s=4.0, variation=variation).draw(20_000, seed=0))
    assert waits_s.mean() == pytest.approx(0.25, rel=0.05)
    assert waits_s.std() / waits_s.mean() == pytest.approx(variation, rel=0.05)


def test_a_poisson_process_is_memoryless() -> None:
    waits_s = np.diff(Arrivals(rate_per_s=4.0).draw(20_000, seed=1))
    for longer_than_s in (0.1, 0.25, 0.5):
        assert (waits_s > longer_than_s).mean() == pytest.approx(np.exp(-4 * longer_than_s), rel=0.05)


def test_arrivals_without_variation_come_like_a_clock() -> None:
    assert Arrivals(rate_per_s=2.0, variation=0).draw(3, seed=0) == pytest.approx([0.5, 1.0, 1.5])


def test_the_same_seed_gives_the_same_times() -> None:
    arrivals = Arrivals(rate_per_s=1.0)
    assert arrivals.draw(50, seed=1).tolist() == arrivals.draw(50, seed=1).tolist()
    assert arrivals.draw(50, seed=1).tolist() != arrivals.draw(50, seed=2).tolist()


def test_bursts_come_all_at_once_in_their_rhythm() -> None:
    assert Arrivals(burst_every_s=10.0, burst_size=3).draw(7, seed=0).tolist() == [10, 10, 10, 20, 20, 20, 30]


def test_bursts_come_beside_others() -> None:
    times = Arrivals(rate_per_s=1.0, burst_every_s=10.0, burst_size=20).draw(900, seed=0).tolist()
    assert times == sorted(times)
    counts = Counter(times)
    assert all(counts[10.0 * number] == 20 for number in range(1, int(times[-1] / 10)))
    assert times[-1] == pytest.approx(300, rel=0.1), "three a second altogether"


def test_recorded_times_are_kept_and_sorted() -> None:
    arrivals = Arrivals(recorded_s=(3.0, 1.0, 2.0))
    assert arrivals.draw(2, seed=0).tolist() == [1, 2]
    with pytest.raises(ConfigurationError, match="4 arrivals were asked for, and 3 are recorded"):
        arrivals.draw(4, seed=0)


def test_a_file_holds_times_or_delays(tmp_path: Path) -> None:
    file = tmp_path / "poisson_delays_2.txt"
    file.write_text("0.5\n\n0.75\n1e0\n")
    assert read_arrivals(file).recorded_s == (0.5, 0.75, 1.0)
    assert read_arrivals(file, delays=True).recorded_s == (0.5, 1.25, 2.25)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "nothing ever comes"),
        ({"rate_per_s": 0.0}, r"rate_per_s=0\.0"),
        ({"rate_per_s": 1.0, "variation": -1.0}, "variation=-1.0"),
        ({"rate_per_s": 1.0, "variation": 1e200}, "variation=1e[+]200 must be 0 to 1000"),
        (
            {"burst_every_s": 1.0, "burst_size": 10**13},
            "burst_size=10000000000000 must be a whole number of 0 to 10,000,000",
        ),
        ({"burst_every_s": 1.0, "burst_size": 2.5}, "burst_size=2.5 must be a whole number"),
        ({"rate_per_s": "4"}, "rate_per_s='4' must be finite"),
        ({"rate_per_s": 10**400}, "rate_per_s=10+ must be finite"),
        ({"rate_per_s": True}, "rate_per_s=True must be finite"),
        ({"rate_per_s": 1.0, "variation": None}, "variation=None must be 0 to 1000"),
        ({"recorded_s": 4}, "recorded_s=4 must be one or more times"),
        ({"recorded_s": "123"}, "recorded_s='123' must be one or more times"),
        ({"recorded_s": b"a"}, "recorded_s=b'a' must be one or more times"),
        ({"recorded_s": np.array(3.0)}, "recorded_s=array.* must be one or more times"),
        ({"recorded_s": ("1",)}, "recorded_s holds '1': all must be finite numbers"),
        ({"rate_per_s": 1.0, "burst_every_s": 1.0}, "go together"),
        ({"rate_per_s": 1.0, "burst_size": 4}, "go together"),
        ({"rate_per_s": 1.0, "recorded_s": (1.0,)}, "not both"),
        ({"recorded_s": (1.0, float("nan"))}, "nan"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Arrivals(**wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    arrivals = Arrivals(rate_per_s=np.float32(0.5), burst_every_s=np.int64(3), burst_size=np.int64(2))
    assert arrivals == Arrivals(rate_per_s=0.5, burst_every_s=3.0, burst_size=2)
    assert Arrivals(recorded_s=np.array([1.0, 2.0])).recorded_s == (1.0, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_arrivals", "seed"), [(3, None), (3, -1), (3, "1"), (3, True), (10**400, 0), (2.5, 0)])
def test_what_cannot_be_drawn_is_refused(num_arrivals: Any, seed: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(seed|num_arrivals)=.* must be a whole number"):
        Arrivals(rate_per_s=1).draw(num_arrivals, seed=seed)
