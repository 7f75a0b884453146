"""Which expert deserves which format: DynaExq's hotness, DyMoE's importance, the cache rules between them. Pure numpy."""
