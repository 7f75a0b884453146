"""What `vismoe gpu-check` runs: stages, each in a process of its own with a deadline, and one JSON file that grows with them.

`stages` is their table, `runner` runs them, `stage` is the process of one. What they do is in `tests` (pytest), `machine`,
`rates` and `contest`. `summary` makes rows, ratios and the printed tables.
"""
