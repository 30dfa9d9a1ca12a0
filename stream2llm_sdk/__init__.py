"""Retrieval that streams into the model while it is still running, on stock vLLM."""

from stream2llm_sdk.answer import Answer, AnswerPiece, ContextEnd, Source, Timings, TokenCounts
from stream2llm_sdk.answer_stream import AnswerStream
from stream2llm_sdk.context import (
    Append,
    Chunk,
    ContextMode,
    ContextUpdate,
    Replace,
    Retriever,
    SourceFailure,
    as_retriever,
)
from stream2llm_sdk.context_markers import ContextMarkers
from stream2llm_sdk.gathering import ContextEvent
from stream2llm_sdk.growing_prompt import Prompt, PromptChange
from stream2llm_sdk.placement import ChunkOrder, DroppedChunk, DropReason, Placement
from stream2llm_sdk.prompt import PromptAssembler
from stream2llm_sdk.prompt_history import PromptHistory, PromptStep
from stream2llm_sdk.rag import StreamingRAG
from stream2llm_sdk.tokenizer import load_tokenizer
from stream2llm_sdk.traffic_recording import KeptTexts, TrafficRecording
from stream2llm_sdk.trail import EventTrail, EventType, Interval, TrailEvent

__all__ = [
    "Answer",
    "AnswerPiece",
    "AnswerStream",
    "Append",
    "Chunk",
    "ChunkOrder",
    "ContextEnd",
    "ContextEvent",
    "ContextMarkers",
    "ContextMode",
    "ContextUpdate",
    "DropReason",
    "DroppedChunk",
    "EventTrail",
    "EventType",
    "Interval",
    "KeptTexts",
    "Placement",
    "Prompt",
    "PromptAssembler",
    "PromptChange",
    "PromptHistory",
    "PromptStep",
    "Replace",
    "Retriever",
    "Source",
    "SourceFailure",
    "StreamingRAG",
    "Timings",
    "TokenCounts",
    "TrafficRecording",
    "TrailEvent",
    "as_retriever",
    "load_tokenizer",
]
__version__ = "0.1.0"
