"""Settings for every test process, made before anything heavy is imported."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
# Threads that wait should leave the cores to the tests' other processes, as the engine itself asks for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A test's time says how busy the machine is, not whether it is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
