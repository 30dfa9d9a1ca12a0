"""The published tables, run again in virtual time."""
