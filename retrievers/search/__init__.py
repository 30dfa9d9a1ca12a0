"""From a question to pages to read: search services, known pages, and what a data set says."""
