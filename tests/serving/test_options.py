"""The scheduler's options: what cannot work is said at once, and the rest arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B
from stream2llm_sdk.serving.options import SchedulingOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"victims": "NOBODY"}, "unknown order of victims 'NOBODY'"),
        ({"preemption_mode": "guess"}, "preemption_mode must be one of cost, recompute, swap"),
        ({"preemption_mode": "swap"}, "give host_kv_bytes"),
        ({"host_kv_bytes": 0}, "host_kv_bytes=0"),
        ({"host_kv_bytes": 1.5}, "host_kv_bytes=1.5"),
        ({"length_predictor": "oracle"}, "length_predictor='oracle'"),
        ({"length_predictor": "absent.json"}, "length_predictor='absent.json' is not a file"),
        ({"cost_model": "absent.json"}, "cost_model='absent.json' is not a file"),
        ({"tenant_weights": {"a": -1}}, "tenant 'a' is -1"),
        ({"tenant_weights": {"a": 10**400}}, "tenant 'a' is 1000"),
        ({"tenant_weights": ["a"]}, "tenant_weights must map"),
        ({"tenant_weights": None}, "tenant_weights=None: give a mapping"),
        ({"tenant_weights": {1: 2}}, "tenants have names, 1 is none"),
        ({"victims": None}, "victims=None: give a name"),
        ({"length_predictor": 5}, "length_predictor=5: give a name"),
        ({"frozen_costs": "no"}, "frozen_costs='no'"),
        ({"look_ahead": 1}, "look_ahead=1"),
        ({"cost_model": 5}, "cost_model=5 is not a file"),
        ({"cost_model": ""}, "cost_model='' is not a file"),
        ({"host_kv_bytes": 10**18}, "this machine has"),
    ],
)
def test_an_option_that_cannot_work_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SchedulingOptions(**options)


def test_options_arrive_at_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    H200_LLAMA_8B.save(file)
    options = SchedulingOptions(
        victims="latest_completion",
        host_kv_bytes=1 << 20,
        preemption_mode="SWAP",
        cost_model=file,
        tenant_weights={"a": 2},
    )
    assert options.for_scheduler() == {
        "victims": "LATEST_COMPLETION",
        "preemption_mode": "SWAP",
        "cost_model": str(file),
        "frozen_costs": False,
        "length_predictor": "quantile",
        "look_ahead": True,
        "tenant_weights": {"a": 2},
    }
