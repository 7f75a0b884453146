"""Tasks of lmms-eval on the demo world: a YAML file each, and the documents and scores behind them."""
