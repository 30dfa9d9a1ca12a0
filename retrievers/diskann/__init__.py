"""DiskANN: building, opening and searching an index on disk."""
