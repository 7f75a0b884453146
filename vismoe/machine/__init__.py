"""What the machine has, how fast it reads, and what is chosen because of it.

`facts` looks; `rates` and `disk` measure, `measure` both; `profile` keeps what was measured; `choices`, `ceilings` and `advice`
are pure functions of all that.
"""
