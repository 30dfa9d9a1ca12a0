"""The web as context: fetching, converting and crawling pages."""
