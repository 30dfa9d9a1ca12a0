"""Recording traces: questions are asked, and what was retrieved for each, and when, is kept in a folder."""
