"""Traces of retrieval: formats, replay and statistics."""
