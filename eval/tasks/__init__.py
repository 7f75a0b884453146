"""Tasks of lmms-eval on the demo world: a YAML file each, and code for their documents and scores."""
