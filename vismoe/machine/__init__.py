"""What the machine has, how fast it reads, and the choices that follow from that.

`facts` inspects; `rates` and `disk` measure, `measure` runs both; `profile` stores the rates; `choices`, `ceilings` and `advice`
are pure functions of these.
"""
