"""Where the time of requests went: what a trace notes, a table, a file for Perfetto, a picture."""
