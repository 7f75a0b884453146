"""Which expert gets which format: DynaExq's hotness, DyMoE's importance, and the cache rules that connect them. Pure numpy."""
